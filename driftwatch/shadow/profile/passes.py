"""The passes of an engine's step, and nothing around them: B sequences in lockstep on caches of L tokens each.

Time depends on shapes, not on tokens, so a window is never really accepted: each step begins again at the same L
tokens. What is fed is random and differs between the sequences, so that a mixture of experts reads as many of them as
real traffic would. Caches hold whole layers, also of a target whose attention slides: past its window the cost of
context is then overstated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import functional as F
from transformers import DynamicCache

from driftwatch.shadow.causal import Causal
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.profile.loop import Lap

STEPS = 4
"""Steps a call; the loop that calls takes turns between shapes, so that a slow moment hits all of them."""

SEED = 0


class Proposer(Protocol):
    """A draft that can make single proposals for a batch."""

    layers: tuple[int, ...]
    """Hidden states of the target that it reads, as indices into ``hidden_states``."""

    def begin(self, batch: int, context: int) -> None:
        """Have a cache of ``context`` tokens for each of ``batch`` sequences."""

    def propose(self, ids: torch.Tensor) -> torch.Tensor:
        """One pass over [batch, 1] ids: the next proposal [batch, 1]. Proposals add up in the cache."""

    def verified(self, ids: torch.Tensor, states: list[torch.Tensor]) -> None:
        """What the draft does with the [batch, 1 + gamma] ids that were verified; then back to ``context``."""


class Passes:
    """Plain steps and windows of a target, with a draft or with none."""

    most_sequences = None

    def __init__(self, target: Causal, draft: Proposer | None = None) -> None:
        self._target, self._draft = Cached(target), draft
        self._draws = torch.Generator().manual_seed(SEED)

    @torch.inference_mode()
    def laps(self, batch: int, context: int, gamma: int) -> list[Lap]:
        device = self._target.device
        self._target.begin(batch, context)
        if gamma and self._draft is not None:
            self._draft.begin(batch, context)
        layers = self._draft.layers if gamma and self._draft is not None else ()
        found = []
        for _ in range(STEPS):
            fed = torch.randint(self._target.vocabulary, (batch, 1 + gamma), generator=self._draws).to(device)
            drafts = []
            if gamma and self._draft is not None:
                for depth in range(gamma):
                    seconds, _ = timed(device, self._draft.propose, fed[:, depth : depth + 1])
                    drafts.append(seconds)
            found.append(Lap(timed(device, self._verify, fed, layers)[0], drafts))
        return found

    def _verify(self, fed: torch.Tensor, layers: tuple[int, ...]) -> int:
        """The pass, the target's choices, how many proposals they confirm, and the cache cut back."""
        choices, states = self._target.step(fed, layers)
        matches = (choices[:, :-1] == fed[:, 1:]).cumprod(dim=1).sum(dim=1)
        self._target.rewind()
        if fed.shape[1] > 1 and self._draft is not None:
            self._draft.verified(fed, states)
        return int(matches.max())  # a host waits for the counts at every step


class Cached:
    """A causal language model on a cache that can be cut back."""

    layers: tuple[int, ...] = ()

    def __init__(self, causal: Causal) -> None:
        self._causal = causal
        self.device, self.vocabulary = causal.device, len(causal.embedding)
        self._cache: Any = None
        self._held = (0, 0)

    def begin(self, batch: int, context: int) -> None:
        """One sequence is prefilled and its cache repeated: what the numbers are costs no time."""
        if self._held != (batch, context):
            self._cache = DynamicCache()
            ids = torch.arange(context, device=self.device)[None] % self.vocabulary
            for part in torch.split(ids, self._causal.prefill_tokens, dim=1):
                self._causal.backbone(input_ids=part, use_cache=True, **{self._causal._cache_name: self._cache})
            self._cache.batch_repeat_interleave(batch)
            self._held = (batch, context)
        self.rewind()

    def step(self, ids: torch.Tensor, layers: tuple[int, ...] = ()) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The first choice [batch, n] after each of the [batch, n] ids, and the hidden states asked for."""
        options = {self._causal._cache_name: self._cache, "output_hidden_states": bool(layers)}
        done = self._causal.model(input_ids=ids, use_cache=True, **options)
        return done.logits.argmax(dim=-1), [done.hidden_states[layer] for layer in layers]

    def rewind(self) -> None:
        for layer in self._cache.layers:
            layer.keys = layer.keys[:, :, : self._held[1]]
            layer.values = layer.values[:, :, : self._held[1]]

    def propose(self, ids: torch.Tensor) -> torch.Tensor:
        return self.step(ids % self.vocabulary)[0]  # a cut vocabulary is fed ids of its own

    def verified(self, ids: torch.Tensor, states: list[torch.Tensor]) -> None:
        self.rewind()


class Eagle3Passes:
    """Single passes of an EAGLE-3 head, with torch's own attention over a cache of random keys."""

    def __init__(self, draft: Eagle3Draft) -> None:
        self._head, self._embedding, self.layers = draft._head, draft._embedding, draft.layers
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
        return head.logits(out).argmax(dim=-1)[:, None]

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


def timed(device: torch.device, call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds of a call, until the device has finished it; and what it gave."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = call(*arguments)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result
