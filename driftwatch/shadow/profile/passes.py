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
from transformers import DynamicCache

from driftwatch.economics.shape import CHAIN, Shape
from driftwatch.shadow.causal import Causal
from driftwatch.shadow.profile.loop import Lap

STEPS = 4
"""Steps a call; the loop that calls takes turns between shapes, so that a slow moment hits all of them."""

SEED = 0


class Proposer(Protocol):
    """A draft whose passes can be made one by one, for a batch."""

    layers: tuple[int, ...]
    """Hidden states of the target that it reads, as indices into ``hidden_states``."""

    def begin(self, batch: int, context: int) -> None:
        """Have a cache of ``context`` tokens for each of ``batch`` sequences."""

    def propose(self, ids: torch.Tensor) -> torch.Tensor:
        """One pass over [batch, 1] ids: the next proposals [rows, n]. Proposals add up in the cache."""

    def verified(self, ids: torch.Tensor, states: list[torch.Tensor]) -> None:
        """What the draft does with the [batch, 1 + gamma] ids that were verified; then back to ``context``."""


class Passes:
    """Plain steps and windows of a target, with a draft or with none. ``gamma`` is the tokens verified beside the last
    one; how many passes of the draft that takes is its shape's."""

    most_sequences = None

    def __init__(self, target: Causal, draft: Proposer | None = None, shape: Shape = CHAIN) -> None:
        self._target, self._draft, self._shape = Cached(target), draft, shape
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
                passes = range(int(self._shape.passes(gamma)))
                drafts = [timed(device, self._draft.propose, fed[:, [number % gamma]])[0] for number in passes]
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


def timed(device: torch.device, call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds of a call, until the device has finished it; and what it gave."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = call(*arguments)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result
