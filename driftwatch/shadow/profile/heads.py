"""Passes of drafts that read a target's hidden states, for the same loop: EAGLE-3 heads as chains and as trees, block
drafts and MTP heads. What they read is random, since only shapes cost time."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from driftwatch.shadow.block.replay import BlockDraft
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.eagle3.rollout import Eagle3TreeDraft, choices


class Eagle3Passes:
    """Single passes of an EAGLE-3 head, with torch's own attention over a cache of random keys."""

    def __init__(self, draft: Eagle3Draft) -> None:
        self._head, self._embedding, self.layers = draft.head, draft.embedding, draft.layers
        self._first = draft.checkpoint.spec.first_position
        self._keys = self._values = self._hidden = torch.empty(0)
        self._context = 0

    def begin(self, batch: int, context: int) -> None:
        spec = self._head.spec
        make: dict[str, Any] = {"device": self._head.device, "dtype": self._head.dtype}
        self._context = context
        if self._keys.shape[:1] + self._keys.shape[2:3] != (batch, context):
            shape = (batch, spec.kv_heads, context, spec.head_dim)
            self._keys, self._values = torch.randn(shape, **make), torch.randn(shape, **make)
            self._hidden = torch.randn((batch, spec.hidden), **make)

    def propose(self, ids: torch.Tensor) -> torch.Tensor:
        head, spec = self._head, self._head.spec
        batch, at = len(ids), self._keys.shape[2]
        positions = torch.full((batch,), at + self._first, device=head.device)
        embedded = F.embedding(ids[:, 0].to(head.device), self._embedding)
        query, own = head.query(embedded, self._hidden, positions, keys=True)
        assert own is not None
        self._append(own.keys.transpose(0, 1)[:, :, None], own.values.transpose(0, 1)[:, :, None])
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[:, :, None], self._keys, self._values, enable_gqa=spec.heads != spec.kv_heads
        )
        out = head.finish(self._hidden, attended.reshape(batch, -1))
        self._hidden = head.feedback(out)
        return self._choose(head.logits(out))

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1)[:, None]

    def verified(self, ids: torch.Tensor, states: list[torch.Tensor]) -> None:
        """The keys of the proposals give way to those of the target's own states."""
        head = self._head
        self._keys, self._values = self._keys[:, :, : self._context], self._values[:, :, : self._context]
        batch, width = ids.shape
        positions = (torch.arange(width, device=head.device) + self._context + self._first).repeat(batch)
        projected = head.project(states).flatten(0, 1)
        head.context(F.embedding(ids.flatten().to(head.device), self._embedding), projected, positions)
        self._hidden = projected.view(batch, width, -1)[:, -1]

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._keys, self._values = torch.cat([self._keys, keys], dim=2), torch.cat([self._values, values], dim=2)


class TreePasses(Eagle3Passes):
    """Passes of a head over a whole beam: ``topk`` rows a sequence, each of which reads the sequence's cache, as in
    SGLang's draft decode. The first level's pass, over the root alone, is taken to cost as much."""

    def __init__(self, draft: Eagle3TreeDraft) -> None:
        super().__init__(draft)
        self._topk = draft.tree.topk

    def begin(self, batch: int, context: int) -> None:
        super().begin(batch * self._topk, context)

    def propose(self, ids: torch.Tensor) -> torch.Tensor:
        return super().propose(ids.repeat_interleave(self._topk, dim=0))

    def verified(self, ids: torch.Tensor, states: list[torch.Tensor]) -> None:
        super().verified(ids, states)
        self._hidden = self._hidden.repeat_interleave(self._topk, dim=0)

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        return choices(logits, self._topk)[1]


class BlockPasses:
    """One pass of a block draft, which makes as many proposals as it was opened for; of an MTP head, opened for one.

    The sequences of a batch share one cache of random keys: reading as many of them, a few layers' each, is left out.
    """

    def __init__(self, draft: BlockDraft) -> None:
        self._draft, self._head = draft, draft.head
        self.layers = draft.layers if draft.layers is not None else (draft.states.layers,)
        self._embedded = self._context = self._at = torch.empty(0)
        self._held = (0, 0)

    def begin(self, batch: int, context: int) -> None:
        if self._held == (batch, context):
            return
        table, width = self._draft.embedding, self._head.reads.width
        make: dict[str, Any] = {"device": table.device, "dtype": table.dtype}
        self._embedded = table[torch.arange(context + 1, device=table.device) % len(table)]
        states = self._head.project([torch.randn(context + 1, width, **make) for _ in self.layers])
        self._context = self._head.context(states, self._embedded)
        self._at = torch.full((batch,), context, device=table.device)
        self._held = (batch, context)

    def propose(self, ids: torch.Tensor) -> torch.Tensor:
        self._embedded[-1] = self._draft.embedding[ids[-1, 0].to(self._embedded.device)]
        found = self._head.propose(self._context, self._embedded, self._at, self._draft.proposals)
        return torch.stack([self._draft.logits(out).argmax(dim=-1) for out in found], dim=1)

    def verified(self, ids: torch.Tensor, states: list[torch.Tensor]) -> None:
        """The keys of what was verified, of all sequences as one."""
        embedded = F.embedding(ids.flatten().to(self._embedded.device), self._draft.embedding)
        self._head.context(self._head.project(states).flatten(0, 1), embedded)
