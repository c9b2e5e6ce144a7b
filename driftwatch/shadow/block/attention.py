"""Attention of many windows of one sample at once: each sees a part of the sample's context, and its own slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SCORE_ELEMENTS = 1 << 25
"""Attention scores held at a time, over heads x slots x keys."""


@dataclass(frozen=True)
class Keys:
    """Keys and values [kv heads, ..., head_dim] each: of a context [kv heads, C, head_dim], or of windows' own slots
    [kv heads, R, K, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    def __getitem__(self, rows: slice) -> Keys:
        """Some windows, or some positions of a context."""
        return Keys(self.keys[:, rows], self.values[:, rows])


def joined(parts: Sequence[Keys]) -> Keys:
    """A context's keys from those of its pieces."""
    return Keys(torch.cat([part.keys for part in parts], dim=1), torch.cat([part.values for part in parts], dim=1))


def attend(
    query: torch.Tensor,
    context: Keys,
    seen: torch.Tensor,
    own: Keys | None = None,
    mask: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """[R, Q, heads x head_dim] from queries [heads, R, Q, head_dim] of R windows with Q slots.

    Window r sees the first ``seen[r]`` keys of the context (ascending), and of its own slots [kv heads, R, K, head_dim]
    those that ``mask`` [Q, K] allows its slot. ``window``: slot q, at position seen[r] + q, sees no context more than
    ``window - 1`` positions before it. Scores are held for few windows at a time, whatever the length of the context.
    """
    heads, rows, slots, head_dim = query.shape
    dtype, kv_heads = query.dtype, context.keys.shape[0]
    if query.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):  # very slow in batches there
        query, context = query.float(), Keys(context.keys.float(), context.values.float())
        own = None if own is None else Keys(own.keys.float(), own.values.float())
    grouped = query.view(kv_heads, heads // kv_heads, rows, slots, head_dim) * head_dim**-0.5
    found = query.new_empty(rows, slots, heads, head_dim)
    longest = int(seen[-1]) if rows else 0
    block = max(1, SCORE_ELEMENTS // (heads * slots * (longest + slots)))
    for start in range(0, rows, block):
        part = slice(start, min(rows, start + block))
        reach = seen[part]
        first = 0 if window is None else max(0, int(reach[0]) - window + 1)
        near = context[slice(first, int(reach[-1]))]
        scores = torch.einsum("kgrqd,kcd->kgrqc", grouped[:, :, part], near.keys)
        position = torch.arange(first, first + near.keys.shape[1], device=query.device)
        hidden = position >= reach[:, None, None]
        if window is not None:
            at = reach[:, None] + torch.arange(slots, device=query.device)
            hidden = hidden | (position <= (at - window)[:, :, None])
        scores = scores.masked_fill(hidden, float("-inf"))
        if own is not None and mask is not None:
            among = torch.einsum("kgrqd,krsd->kgrqs", grouped[:, :, part], own.keys[:, part])
            scores = torch.cat([scores, among.masked_fill(~mask, float("-inf"))], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        length = near.keys.shape[1]
        mixed = torch.einsum("kgrqc,kcd->rqkgd", weights[..., :length], near.values)
        if own is not None:
            mixed = mixed + torch.einsum("kgrqs,krsd->rqkgd", weights[..., length:], own.values[:, part])
        found[part] = mixed.reshape(mixed.shape[0], slots, heads, head_dim)
    return found.view(rows, slots, -1).to(dtype)
