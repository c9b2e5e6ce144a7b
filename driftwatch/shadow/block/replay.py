"""Replaying DFlash, Domino, P-EAGLE and MTP drafts on served tokens: every start is one window, independent of others.

So no walk is needed to know where windows start, and every proposal length comes from one replay. It is the exact way
and costs, beyond the target's prefill, what the head's slots at every judged token cost: for a DFlash of 5 layers and
16 slots 80 layer passes a token, where a walk would visit one start in an acceptance length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from driftwatch.acceptance import Rule, Weights
from driftwatch.errors import ModelError
from driftwatch.shadow.agreement import Agreement
from driftwatch.shadow.block import dflash, domino, mtp, peagle
from driftwatch.shadow.block.checkpoint import Checkpoint
from driftwatch.shadow.block.head import Head, Kind
from driftwatch.shadow.draft import Fingerprint, Tokens
from driftwatch.shadow.eagle3.spec import default_layers
from driftwatch.shadow.figures import Figures, agreements, target_rows
from driftwatch.shadow.headed import HeadedDraft
from driftwatch.shadow.judge import VocabularyMap, judge, rows_at_once
from driftwatch.shadow.packing import Packed, pack
from driftwatch.shadow.states.source import Read, States
from driftwatch.shadow.target import Target
from driftwatch.shadow.warp import Sampling

SLOTS = 16_384
"""Slots of windows computed at a time."""

ARCHITECTURES: Mapping[str, Kind] = {
    "DFlashDraftModel": "dflash",
    "DominoDraftModel": "domino",
    "PEagleDraftModel": "peagle",
    "Qwen3_5MTPDraftModel": "mtp",
}

READERS: Mapping[Kind, Callable[[Path], tuple[Any, Checkpoint]]] = {
    "dflash": dflash.read,
    "domino": domino.read,
    "peagle": peagle.read,
    "mtp": mtp.read,
}
HEADS: Mapping[Kind, Callable[[Any, Mapping[str, torch.Tensor]], Head[Any]]] = {
    "dflash": dflash.DFlashHead,
    "domino": domino.DominoHead,
    "peagle": peagle.PEagleHead,
    "mtp": mtp.MTPHead,
}


@dataclass(frozen=True)
class _Batch:
    """A batch and what the target gave for it."""

    packed: Packed
    read: Read
    lengths: Sequence[int]
    sampling: Sampling | None


class BlockDraft(HeadedDraft):
    """A head on its target."""

    head: Head[Any]
    proposals: int
    """Made in a window."""

    def __init__(
        self,
        spec: Any,
        checkpoint: Checkpoint,
        target: Target,
        *,
        depths: int,
        rule: Rule = "argmax",
        agreement: bool = False,
    ) -> None:
        """``spec`` is what the head's module reads of a checkpoint. ``depths`` proposals are replayed at each start, or
        as many as the head has. ``agreement``: give the agreement figures too, which costs the target's logits. Raises
        ModelError if head and target do not fit, or if the target itself is needed and cannot be had."""
        self.spec, self.checkpoint, self.depths, self.rule, self.agreement = spec, checkpoint, depths, rule, agreement
        reads = spec.reads
        needs_logits = agreement or rule == "rejection"
        self._target = target.model() if needs_logits or reads.layers is None else None
        self._needs_logits = needs_logits
        self.states = states = target.states()
        self.layers = reads.layers if reads.layers != () else default_layers(states.layers)
        own = checkpoint.tensors.get("lm_head.weight")
        _check(checkpoint, reads.width, self.layers, 0 if own is None else len(own), states, target)
        device, dtype = states.draft_device, states.dtype
        tensors = {name: value.to(device, dtype) for name, value in checkpoint.tensors.items()}
        self.embedding = tensors.setdefault("embed_tokens.weight", states.embedding.to(device))
        if reads.mask is not None and reads.mask >= len(self.embedding):
            raise ModelError(f"{checkpoint.what}: its mask token {reads.mask} is none of the target's")
        self._head_weight = tensors.get("lm_head.weight", states.head_weight)
        if (more := tensors.get(domino.CORRECTION)) is not None:  # a second output head beside the first
            self._head_weight = torch.cat([self._head_weight.to(device), more], dim=1)
        self.head = HEADS[reads.kind](spec, tensors)
        self._map = VocabularyMap(checkpoint.to_target, device)
        self.proposals = depths if reads.slots is None else min(depths, reads.slots)
        self.fingerprint = Fingerprint(
            reads.kind, checkpoint.sha256, checkpoint.parameters, len(self._head_weight), str(checkpoint.path)
        )

    @classmethod
    def load(
        cls, kind: Kind, folder: Path, target: Target, *, depths: int, rule: Rule = "argmax", agreement: bool = False
    ) -> BlockDraft:
        """Load a checkpoint folder. Raises ModelError with one line if it cannot be used."""
        return cls(*READERS[kind](folder), target, depths=depths, rule=rule, agreement=agreement)

    @torch.inference_mode()
    def measure(self, batch: Sequence[Tokens]) -> list[tuple[Weights, Agreement | None]]:
        packed = pack(batch)
        sampling = Sampling.of_batch(batch) if self.rule == "rejection" else None
        given = _Batch(packed, self._read(packed), [tokens.length for tokens in batch], sampling)
        figures = Figures.empty(len(packed.served), self.proposals, full=self.agreement)
        for b in range(len(batch)):
            self._sample(given, b, figures)
        weights = [self._weights(values) for values in packed.split(figures.weight)]
        if not self.agreement:
            return [(one, None) for one in weights]
        served = packed.served.to(self.embedding.device)
        outside = self._map.draft_ids(served, self.fingerprint.vocabulary).cpu().numpy() < 0
        return list(zip(weights, agreements(packed, figures, outside), strict=True))

    def _read(self, packed: Packed) -> Read:
        if self.layers is not None:
            return self.states.read(packed, self.layers, self.head.project, final=self._needs_logits)
        assert self._target is not None
        passes = self._target.prefill(packed.ids.to(self._target.device))
        last = torch.cat([states for _, _, states in passes if states is not None], dim=1)
        return Read(self.head.project([last]), packed.gather([(0, last)]) if self._needs_logits else None)

    def _sample(self, given: _Batch, b: int, figures: Figures) -> None:
        """All windows of one sample, some at a time; what comes of them goes into ``figures``."""
        packed, device = given.packed, self.embedding.device
        length = given.lengths[b]
        embedded = F.embedding(packed.ids[b, :length].to(device), self.embedding)
        context = self.head.context(given.read.states[b, :length], embedded)
        served, final = packed.served.to(device), given.read.final
        stop = packed.bounds[b + 1]
        for rows in self._windows(packed.bounds[b], stop):
            target = None
            if self._target is not None and final is not None:
                reach = slice(rows.start, min(rows.stop + self.proposals - 1, stop))
                target = target_rows(self._target, final, served, given.sampling, reach, full=self.agreement)
                if self.agreement:
                    figures.surprise(rows, target[: rows.stop - rows.start], served[rows])
            at = packed.position[rows].to(device)
            for depth, out in enumerate(self.head.propose(context, embedded, at, self.proposals)):
                live = min(rows.stop, stop - depth) - rows.start  # windows whose proposal meets a served token
                if live <= 0:
                    break
                tokens = slice(rows.start + depth, rows.start + depth + live)
                verdicts = judge(
                    self.logits(out[:live]),
                    served[tokens],
                    self._map,
                    rule=self.rule,
                    target=None if target is None else target[depth : depth + live],
                    sampling=None if given.sampling is None else given.sampling[tokens].to(device),
                )
                figures.put(torch.arange(rows.start, rows.start + live), depth, verdicts)

    def _windows(self, start: int, stop: int) -> Iterator[slice]:
        widest = max(len(self._head_weight), 0 if self._target is None else self._target.vocabulary)
        size = max(1, min(rows_at_once(widest), SLOTS // (self.proposals + 1)))
        return (slice(at, min(at + size, stop)) for at in range(start, stop, size))

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """[.., ids that it can propose] from what the head gives, [.., width]."""
        return F.linear(out, self._head_weight)

    def _weights(self, values: np.ndarray[Any, Any]) -> Weights:
        missing = self.depths - self.proposals
        if missing == 0:
            return Weights(values)
        return Weights(np.pad(values, ((0, 0), (0, missing))), np.full(len(values), self.proposals))


def _check(
    checkpoint: Checkpoint, width: int, layers: tuple[int, ...] | None, ids: int, states: States, target: Target
) -> None:
    """Raises ModelError if a head that reads so much, and proposes so many ids of its own, does not fit its target."""
    what = f"{checkpoint.what} does not fit the target {target.path}"
    if width != states.hidden:
        raise ModelError(f"{what}: it reads hidden states {width} wide, the target's are {states.hidden}")
    if layers and not set(layers) <= set(states.gives):
        raise ModelError(f"{what}: it reads hidden_states {list(layers)}, the target gives {list(states.gives)}")
    if checkpoint.to_target is not None:
        ids = int(checkpoint.to_target[-1]) + 1
    if ids > states.token_ids:
        raise ModelError(f"{what}: it proposes token ids up to {ids - 1}, the target has {states.token_ids}")
