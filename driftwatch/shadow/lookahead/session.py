"""The target under lookahead decoding: passes over trees of tokens, and a cache that keeps one branch of each."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache

from driftwatch.errors import ModelError
from driftwatch.shadow.lookahead.branches import Tree

PREFILL = 8192
"""Prompt tokens in one pass."""


class Session:
    """The target on one prompt: its cache holds what was emitted, the last token aside."""

    def __init__(self, target: Any, prompt: list[int], max_tokens: int) -> None:
        config = target.config.get_text_config()
        self._limit = int(getattr(config, "max_position_embeddings", None) or 2**31)
        if not prompt or len(prompt) + max_tokens > self._limit:
            raise ModelError(
                f"target {target.name_or_path}: {len(prompt)} prompt and {max_tokens} output tokens do not fit into 1 "
                f"to {self._limit}; set fewer output tokens or leave the sample out"
            )
        self._target = target
        named = inspect.signature(target.forward).parameters
        self._keyword = "cache" if "cache" in named else "past_key_values"  # transformers 5 renames it
        self._windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
        self._cache: Any = DynamicCache()  # plain layers, also where attention slides: branches are taken out again
        self._cached = len(prompt)
        for part in torch.split(torch.tensor([prompt], device=target.device), PREFILL, dim=1):
            self.first = int(self._logits(input_ids=part, logits_to_keep=1)[-1].argmax())

    def choose(self, tree: Tree) -> list[int]:
        """The target's first choice after each token of the tree."""
        seen = tree.visible()
        places = self._cached + seen.sum(dim=1) - 1
        logits = self._logits(
            input_ids=torch.tensor([tree.tokens], device=self._target.device),
            attention_mask=self._mask(seen, places),
            # A guess past the target's last position can only be emitted behind the output's end, where it is cut.
            position_ids=places.clamp(max=self._limit - 1)[None].to(self._target.device),
        )
        chosen: list[int] = logits.argmax(dim=-1).tolist()
        return chosen

    def keep(self, path: list[int]) -> None:
        """Leave the tokens of a path in the cache, drop the rest of the tree."""
        kept = torch.cat([torch.arange(self._cached), self._cached + torch.tensor(path)])
        for layer in self._cache.layers:
            layer.keys = layer.keys[:, :, kept.to(layer.keys.device)]
            layer.values = layer.values[:, :, kept.to(layer.values.device)]
        self._cached += len(path)

    def _logits(self, **inputs: Any) -> Any:
        return self._target(**inputs, **{self._keyword: self._cache}, use_cache=True).logits[0]

    def _mask(self, seen: torch.Tensor, places: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """What a token may see, to be added to the scores; by kind of layer where only some of them slide."""
        visible = torch.cat([torch.ones(len(seen), self._cached, dtype=torch.bool), seen], dim=1)
        distance = places[:, None] - torch.cat([torch.arange(self._cached), places])

        def added(window: int | None) -> torch.Tensor:
            hidden = ~visible if window is None else ~visible | (distance >= window)
            mask = torch.zeros(hidden.shape, dtype=self._target.dtype)
            return mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)[None, None].to(self._target.device)

        kinds = set(self._windows)
        if len(kinds) == 1:
            return added(*kinds)
        return {"sliding_attention" if window else "full_attention": added(window) for window in kinds}


def require_masks(target: Any) -> None:
    """Raises ModelError for attention that takes no mask of its own, or a state that no branch can be taken out of."""
    attention = target.config._attn_implementation
    if attention not in ("eager", "sdpa"):
        raise ModelError(
            f"target {target.name_or_path}: lookahead decoding needs sdpa or eager attention, not {attention}"
        )
    for kind in getattr(target.config.get_text_config(), "layer_types", None) or []:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(f"target {target.name_or_path}: lookahead decoding cannot take back a step of {kind}")
