"""Replaying an EAGLE-3 head on served tokens: every start and every depth by rows in parallel.

The training-time test of the paper, read as a replay (SpecForge's unroll). Of a
sample x[0 .. T-1] with P prompt tokens, row s (P-1 .. T-3) is the window that starts at judged token s - P + 1. At
depth k it is fed token x[s+1+k] and, at k = 0, the projected target layers at position s, later its own output of
depth k - 1; it sees the depth-0 keys of rows 0 .. s and its own keys of depths 1 .. k; its proposal concerns
x[s+2+k]. That x holds the served tokens and not the head's own picks is the point: depth k counts only where the
proposals before it were accepted, and then the two are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from driftwatch.acceptance import Rule, Weights
from driftwatch.errors import ModelError
from driftwatch.shadow.agreement import Agreement
from driftwatch.shadow.draft import Fingerprint, Tokens
from driftwatch.shadow.eagle3.checkpoint import Checkpoint
from driftwatch.shadow.eagle3.head import Eagle3Head, Keys, attend
from driftwatch.shadow.figures import Figures, agreements, target_rows
from driftwatch.shadow.headed import HeadedDraft
from driftwatch.shadow.judge import VocabularyMap, judge, rows_at_once
from driftwatch.shadow.packing import Packed, pack
from driftwatch.shadow.states.source import Read
from driftwatch.shadow.target import Target
from driftwatch.shadow.warp import Sampling

CONTEXT_ROWS = 8192
"""Rows whose depth-0 keys are computed at a time."""


class Eagle3Draft(HeadedDraft):
    """An EAGLE-3 head on its target."""

    head: Eagle3Head

    def __init__(
        self, checkpoint: Checkpoint, target: Target, *, depths: int, rule: Rule = "argmax", agreement: bool = False
    ) -> None:
        """``depths`` proposals are replayed at each start. ``agreement``: give the agreement figures too, which costs
        the target's logits. Raises ModelError if head and target do not fit, or if the target's logits are needed and
        only its hidden states can be had."""
        spec, states = checkpoint.spec, target.states()
        self.checkpoint, self.depths, self.rule, self.agreement = checkpoint, depths, rule, agreement
        self.states = states
        self._target = target.model() if self._needs_logits else None
        what = f"draft {checkpoint.path} does not fit the target {target.path}"
        if spec.target_hidden != states.hidden:
            raise ModelError(f"{what}: it reads layers {spec.target_hidden} wide, the target's are {states.hidden}")
        highest = spec.vocabulary - 1 if checkpoint.to_target is None else int(checkpoint.to_target[-1])
        if highest >= states.token_ids:
            raise ModelError(f"{what}: it proposes token ids up to {highest}, the target has {states.token_ids}")
        try:
            self.layers = spec.layers(states.layers)
        except ModelError as error:
            raise ModelError(f"{what}: {error}") from None
        if not set(self.layers) <= set(states.gives):
            raise ModelError(
                f"{what}: it reads hidden_states {list(self.layers)}, the engine gives {list(states.gives)} "
                "(hidden_states.layers); start the engine with the layers that the draft reads"
            )
        device, dtype = states.draft_device, states.dtype
        tensors = {name: value.to(device, dtype) for name, value in checkpoint.tensors.items()}
        if spec.embedding == "target":
            table = states.embedding.to(device)
            if table.shape[1] != spec.hidden:
                raise ModelError(f"{what}: it needs embeddings {spec.hidden} wide and brings none of its own")
            tensors["embed_tokens.weight"] = table
        if spec.head == "target":
            rows = states.head_weight
            tensors["lm_head.weight"] = rows if checkpoint.to_target is None else rows[checkpoint.to_target.to(device)]
        self.embedding = tensors["embed_tokens.weight"]
        self._map = VocabularyMap(checkpoint.to_target, device)
        self.head = Eagle3Head(spec, tensors)
        self.fingerprint = Fingerprint(
            "eagle3", checkpoint.sha256, checkpoint.parameters, spec.vocabulary, str(checkpoint.path)
        )

    @torch.inference_mode()
    def measure(self, batch: Sequence[Tokens]) -> list[tuple[Weights, Agreement | None]]:
        packed = pack(batch)
        read = self.states.read(packed, self.layers, self.head.project, final=self._needs_logits)
        contexts = self._contexts(packed, read.states, [tokens.length for tokens in batch])
        return self._judge(batch, packed, read, contexts)

    def _judge(
        self, batch: Sequence[Tokens], packed: Packed, read: Read, contexts: list[Keys]
    ) -> list[tuple[Weights, Agreement | None]]:
        """Every start and depth of a batch that has been read."""
        sampling = Sampling.of_batch(batch) if self.rule == "rejection" else None
        figures = Figures.empty(len(packed.served), self.depths, full=self.agreement)
        size = rows_at_once(self._widest)
        for start in range(0, len(packed.served), size):
            rows = slice(start, min(start + size, len(packed.served)))
            self._unroll(packed, read, contexts, sampling, rows, figures)
        weights = [Weights(values) for values in packed.split(figures.weight)]
        outside = self._map.draft_ids(packed.served.to(self.head.device), self.checkpoint.spec.vocabulary).cpu() < 0
        found = agreements(packed, figures, outside.numpy()) if self.agreement else [None] * len(batch)
        return list(zip(weights, found, strict=True))

    @property
    def _widest(self) -> int:
        """Vocabulary of the largest logits that are held."""
        own = self.checkpoint.spec.vocabulary
        return own if self._target is None else max(own, self._target.vocabulary)

    @property
    def _needs_logits(self) -> bool:
        return self.agreement or self.rule == "rejection"

    def _contexts(self, packed: Packed, states: torch.Tensor, lengths: Sequence[int]) -> list[Keys]:
        """Depth-0 keys of each sample's rows 0 .. T-3."""
        device = self.head.device
        ids = packed.ids.to(device)
        contexts = []
        for b, length in enumerate(lengths):
            parts = []
            for start in range(0, length - 1, CONTEXT_ROWS):
                stop = min(start + CONTEXT_ROWS, length - 1)
                positions = torch.arange(start, stop, device=device) + self.checkpoint.spec.first_position
                embedded = F.embedding(ids[b, start + 1 : stop + 1], self.embedding)
                parts.append(self.head.context(embedded, states[b, start:stop], positions))
            keys, values = (torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("keys", "values"))
            contexts.append(Keys(keys, values))
        return contexts

    def _unroll(
        self,
        packed: Packed,
        read: Read,
        contexts: list[Keys],
        sampling: Sampling | None,
        rows: slice,
        figures: Figures,
    ) -> None:
        """All depths of some rows; what comes of them goes into ``figures``."""
        device = self.head.device
        sample, position = packed.sample[rows].to(device), packed.position[rows].to(device)
        ids, left = packed.ids.to(device), packed.left[rows].to(device)
        served = packed.served.to(device)
        target = None
        if self._target is not None and read.final is not None:
            reach = slice(rows.start, min(rows.stop + self.depths - 1, len(served)))
            target = target_rows(self._target, read.final, served, sampling, reach, full=self.agreement)
            if self.agreement:
                figures.surprise(rows, target[: rows.stop - rows.start], served[rows])
        settings = None if sampling is None else sampling[slice(rows.start, None)].to(device)
        segments = _segments(packed, rows)
        hidden = read.states[sample, position - 1]
        own: list[Keys] = []
        for depth in range(self.depths):
            live = (left > depth).nonzero()[:, 0]
            if len(live) == 0:
                break
            fed = ids[sample, (position + depth).clamp(max=ids.shape[1] - 1)]
            at = position - 1 + depth + self.checkpoint.spec.first_position
            query, keys = self.head.query(F.embedding(fed, self.embedding), hidden, at, keys=depth > 0)
            if keys is not None:
                own.append(keys)
            attended = torch.cat(
                [
                    attend(query[:, part], contexts[b], last, [Keys(k.keys[:, part], k.values[:, part]) for k in own])
                    for b, last, part in segments
                ]
            )
            out = self.head.finish(hidden, attended)
            at_token: slice | torch.Tensor = live + depth
            if len(live) == len(left):  # no row has ended: a view will do
                at_token = slice(depth, depth + len(live))
            verdicts = judge(
                self.head.logits(out[live]),
                served[rows.start :][at_token],
                self._map,
                rule=self.rule,
                target=None if target is None else target[at_token],
                sampling=None if settings is None else settings[at_token],
            )
            figures.put(live.cpu() + rows.start, depth, verdicts)
            hidden = self.head.feedback(out)


def _segments(packed: Packed, rows: slice) -> list[tuple[int, torch.Tensor, slice]]:
    """The samples that some packed rows belong to: (sample, row numbers s there, part of the rows)."""
    found = []
    for b in range(int(packed.sample[rows.start]), int(packed.sample[rows.stop - 1]) + 1):
        start, stop = max(rows.start, packed.bounds[b]), min(rows.stop, packed.bounds[b + 1])
        found.append((b, packed.position[start:stop] - 1, slice(start - rows.start, stop - rows.start)))
    return found
