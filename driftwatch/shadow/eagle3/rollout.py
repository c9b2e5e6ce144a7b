"""Judging an EAGLE-3 head that drafts trees: roll-outs at the starts that the walk visits, and no decode of the target.

A tree depends on its start alone, since the target's true hidden states give the keys of all that is committed, as in
``replay``: so a start is rolled out once, whoever asks. The head is fed its own picks and its own outputs. Beam member
j of a step sees the keys that members j of the steps before wrote, not those of its ancestors: so does SGLang's draft
decode, whose cache slots belong to beam positions and are not reordered when a beam is chosen
(``generate_draft_decode_kv_indices``; sgl-project/sglang issue 7523, and pull request 8409, which would have changed it
and was closed). A rotary position is the row's own plus the depth, as since pull request 25015 (May 2026); before it,
depths behind the first were one too high.

Which served tokens a tree accepts needs no target. At temperature 0 the verifier takes the child that is the target's
argmax, which is what it emits. Above it, by target-only sampling with both accept thresholds at 1, children are tried
in turn with the target's own probabilities, and what is emitted after them comes from the rest: a child is accepted
exactly if it is the token served (``TreeSpeculativeSamplingTargetOnly``). With a threshold below 1 that still holds of
the engine's own tree, but its text is no longer the target's: on it, another draft's figures are not exact.

Windows follow one another, and a head pass over a few rows is dear. So every ``STRIDE`` tokens of a sample another
walk sets out, on its own guess of where a window starts, and ends where any of them has been: walks over the same
tokens meet after a few windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from driftwatch.acceptance import Rule, Weights
from driftwatch.errors import ModelError
from driftwatch.shadow.agreement import Agreement
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.eagle3.checkpoint import Checkpoint
from driftwatch.shadow.eagle3.head import Keys, attend
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.eagle3.tree import Growth, Tree, tree_sha256
from driftwatch.shadow.judge import rows_at_once
from driftwatch.shadow.packing import Packed
from driftwatch.shadow.states.source import Read
from driftwatch.shadow.target import Target

STRIDE = 32
"""Judged tokens between the starts of two walks."""


@dataclass
class Cost:
    """What the roll-outs took: trees, passes of the head and rows in them, beside one pass over all that is fed."""

    trees: int = 0
    passes: int = 0
    rows: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class Eagle3TreeDraft(Eagle3Draft):
    """An EAGLE-3 head that drafts trees of one shape. Agreement figures are those of the head as a chain."""

    def __init__(
        self, checkpoint: Checkpoint, target: Target, tree: Tree, *, rule: Rule = "argmax", agreement: bool = False
    ) -> None:
        """Raises ModelError if head, target and tree do not fit, or for a rule by which no engine verifies trees."""
        name = f"{checkpoint.path}:{tree}"
        if rule != "argmax":
            raise ModelError(f"draft {name}: engines verify trees by the argmax rule alone; leave out --rule {rule}")
        if tree.topk > checkpoint.spec.vocabulary:
            raise ModelError(f"draft {name}: `topk` is more than its {checkpoint.spec.vocabulary} token ids")
        super().__init__(checkpoint, target, depths=tree.steps, rule=rule, agreement=agreement)
        self.tree = tree
        self.cost = Cost()
        self.fingerprint = replace(self.fingerprint, sha256=tree_sha256(checkpoint.sha256, tree), path=name)

    def _judge(
        self, batch: Sequence[Tokens], packed: Packed, read: Read, contexts: list[Keys]
    ) -> list[tuple[Weights, Agreement | None]]:
        accepted = self._walk(packed, read, contexts)
        grid = (np.arange(self.tree.steps) < accepted[:, None]).astype(np.float64)
        weights = [Weights(values, walked=True) for values in packed.split(grid)]
        weights = [replace(one, values=np.nan_to_num(one.by_start(self.tree.steps))) for one in weights]
        if not self.agreement:
            return [(one, None) for one in weights]
        unrolled = super()._judge(batch, packed, read, contexts)
        return [(one, agreement) for one, (_, agreement) in zip(weights, unrolled, strict=True)]

    def _walk(self, packed: Packed, read: Read, contexts: list[Keys]) -> NDArray[np.int64]:
        """[N]: served tokens that the tree at each visited start accepts, -1 at the others."""
        accepted = np.full(len(packed.served), -1)
        ends = np.arange(len(accepted)) + packed.left.numpy()
        front = np.concatenate([np.arange(start, stop, STRIDE) for start, stop in pairwise(packed.bounds)])
        widest = max(self.tree.topk * self.checkpoint.spec.vocabulary, self.tree.candidates)
        size = rows_at_once(2 * widest)  # logits, and probabilities beside them
        while len(front):
            for start in range(0, len(front), size):
                part = front[start : start + size]
                accepted[part] = self._roll(packed, read, contexts, torch.from_numpy(part)).cpu().numpy()
            after = front + accepted[front] + 1
            after = np.unique(after[after < ends[front]])
            front = after[accepted[after] < 0]
        return accepted

    def _roll(self, packed: Packed, read: Read, contexts: list[Keys], starts: torch.Tensor) -> torch.Tensor:
        """[starts]: what the trees at some starts accept; ``starts`` are packed rows that ascend, on the CPU.

        A tree whose further levels would change nothing is left out of the later passes.
        """
        device, topk, steps = self.head.device, self.tree.topk, self.tree.steps
        growth = Growth(self.tree, len(starts), device)
        accepted = torch.zeros(len(starts), dtype=torch.long, device=device)
        going = torch.arange(len(starts))
        sample, row, left = packed.sample[starts], packed.position[starts] - 1, packed.left[starts]
        hidden = read.states[sample.to(device), row.to(device)]
        fed = packed.ids[sample, row + 1].to(device)
        own: list[Keys] = []
        self.cost.trees += len(starts)
        for depth in range(steps):
            out, keys = self._pass(fed, hidden, sample[going], row[going], depth, contexts, own)
            own += [] if keys is None else [keys]
            p, choice = choices(self.head.logits(out), topk)
            shape = (len(going), -1, topk)
            at = (starts[going] + depth).clamp(max=len(packed.served) - 1)
            served = torch.where(left[going] > depth, packed.served[at], -1).to(device)
            tokens, parents = growth.grow(p.view(shape), self._map.target_ids(choice).view(shape), served)
            over = growth.settled() if depth + 1 < steps else torch.ones_like(parents[:, 0], dtype=torch.bool)
            accepted[going.to(device)] = growth.accepted()
            stay = (~over).nonzero()[:, 0]
            if len(stay) == 0:
                break
            growth.take(stay)
            given = self.head.feedback(out).view(len(going), -1, out.shape[-1])
            fed, hidden = tokens[stay].flatten(), given[stay[:, None], parents[stay]].flatten(0, 1)
            own = [_of_trees(one, stay, topk) for one in own]
            going = going[stay.cpu()]
        return accepted

    def _pass(
        self,
        fed: torch.Tensor,
        hidden: torch.Tensor,
        sample: torch.Tensor,
        row: torch.Tensor,
        depth: int,
        contexts: list[Keys],
        own: list[Keys],
    ) -> tuple[torch.Tensor, Keys | None]:
        """The layer over the beams of some trees, beam by beam: its output [trees x beam, H] and, but for the roots,
        whose keys are the context's, their own keys."""
        self.cost.passes += 1
        self.cost.rows += len(fed)
        beam = len(fed) // len(row)
        last = row.repeat_interleave(beam)
        at = last.to(self.head.device) + depth + self.checkpoint.spec.first_position
        query, keys = self.head.query(F.embedding(fed, self.embedding), hidden, at, keys=depth > 0)
        seen = own if keys is None else [*own, keys]
        attended, start = [], 0
        for b, count in zip(*np.unique(sample.numpy(), return_counts=True), strict=True):
            part = slice(start, start + count * beam)
            mine = [Keys(one.keys[:, part], one.values[:, part]) for one in seen]
            attended.append(attend(query[:, part], contexts[b], last[part], mine))
            start = part.stop
        return self.head.finish(hidden, torch.cat(attended)), keys


def choices(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and draft ids, [rows, topk] each, of the likeliest next tokens, best first."""
    p = logits.float().softmax(dim=-1)
    index = logits.argmax(dim=-1, keepdim=True) if topk == 1 else p.topk(topk).indices
    return p.gather(1, index), index


def _of_trees(keys: Keys, trees: torch.Tensor, beam: int) -> Keys:
    """The keys of some trees' beams."""
    rows = (trees[:, None] * beam + torch.arange(beam, device=trees.device)).flatten()
    return Keys(keys.keys[:, rows], keys.values[:, rows])
