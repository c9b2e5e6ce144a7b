"""The one decoder layer of an EAGLE-3 head, on packed rows: linear parts over all rows at once, attention by sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from driftwatch.shadow.eagle3.spec import Eagle3Spec

SCORE_ELEMENTS = 1 << 25
"""Attention scores held at a time, over heads x rows x keys."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Keys:
    """Keys and values of some rows, [kv heads, rows, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor


class Eagle3Head:
    """The head's tensors under their normalised names (see ``checkpoint``), and what it computes with them."""

    def __init__(self, spec: Eagle3Spec, tensors: Tensors) -> None:
        self.spec = spec
        self._t = tensors
        self._act = ACT2FN[spec.activation]
        device = tensors["fc.weight"].device
        inverse, self._rope_factor = spec.rope.frequencies(spec.head_dim)
        self._inverse = inverse.to(device)
        self._qkv = torch.cat([tensors[f"self_attn.{name}_proj.weight"] for name in "qkv"])
        biases = [tensors.get(f"self_attn.{name}_proj.bias") for name in "qkv"]
        self._qkv_bias = None if biases[0] is None else torch.cat([bias for bias in biases if bias is not None])
        self._q_size = spec.heads * spec.head_dim
        self._gate_up = torch.cat([tensors["mlp.gate_proj.weight"], tensors["mlp.up_proj.weight"]])

    @property
    def device(self) -> torch.device:
        return self._inverse.device

    @property
    def dtype(self) -> torch.dtype:
        return self._qkv.dtype

    def project(self, layers: list[torch.Tensor]) -> torch.Tensor:
        """The hidden state fed at depth 0: the target's layers, each [..., Ht], to [..., H]."""
        parts = [layer.to(self.device, self.dtype) for layer in layers]
        if self.spec.fc_norm:
            parts = [self._norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)]
        joined = torch.cat(parts, dim=-1)
        if self.spec.norm_before_fc:
            joined = self._norm(joined, "input_norm.weight")
        return F.linear(joined, self._t["fc.weight"], self._t.get("fc.bias"))

    def context(self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> Keys:
        """Keys and values of rows that are only looked at: [rows, H] each, positions [rows]."""
        bias = None if self._qkv_bias is None else self._qkv_bias[self._q_size :]
        mixed = F.linear(self._attention_input(embedded, hidden), self._qkv[self._q_size :], bias)
        return self._keys(mixed, positions)

    def query(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, *, keys: bool
    ) -> tuple[torch.Tensor, Keys | None]:
        """Queries [heads, rows, head_dim] of rows that go on, with their own keys and values where asked."""
        weight = self._qkv if keys else self._qkv[: self._q_size]
        bias = self._qkv_bias if self._qkv_bias is None or keys else self._qkv_bias[: self._q_size]
        mixed = F.linear(self._attention_input(embedded, hidden), weight, bias)
        query = self._split(mixed[:, : self._q_size], self.spec.heads)
        if self.spec.qk_norm:
            query = self._norm(query, "self_attn.q_norm.weight")
        query = self._rotate(query, positions)
        return query, self._keys(mixed[:, self._q_size :], positions) if keys else None

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output [rows, H] before the last norm, from what was fed and what attention gave."""
        residual = self._norm(hidden, "hidden_norm.weight") if self.spec.norm_before_residual else hidden
        out = residual + F.linear(attended, self._t["self_attn.o_proj.weight"], self._t.get("self_attn.o_proj.bias"))
        inner = F.linear(self._norm(out, "post_attention_layernorm.weight"), self._gate_up)
        gate, up = inner.chunk(2, dim=-1)
        return out + F.linear(self._act(gate) * up, self._t["mlp.down_proj.weight"])

    def feedback(self, out: torch.Tensor) -> torch.Tensor:
        """What the next depth is fed of a layer output."""
        return self._norm(out, "norm.weight") if self.spec.norm_output else out

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """[rows, Vd] over the draft's vocabulary."""
        return F.linear(self._norm(out, "norm.weight") if self.spec.last_norm else out, self._t["lm_head.weight"])

    def _attention_input(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        parts = [self._norm(embedded, "input_layernorm.weight"), self._norm(hidden, "hidden_norm.weight")]
        return torch.cat(parts[::-1] if self.spec.hidden_first else parts, dim=-1)

    def _keys(self, mixed: torch.Tensor, positions: torch.Tensor) -> Keys:
        keys, values = (self._split(half, self.spec.kv_heads) for half in mixed.chunk(2, dim=-1))
        if self.spec.qk_norm:
            keys = self._norm(keys, "self_attn.k_norm.weight")
        return Keys(self._rotate(keys, positions), values)

    def _split(self, mixed: torch.Tensor, heads: int) -> torch.Tensor:
        return mixed.view(len(mixed), heads, self.spec.head_dim).transpose(0, 1)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate-half form, angles in float32: x [heads, rows, head_dim], positions [rows]."""
        angles = positions[:, None].float() * self._inverse
        cos = (angles.cos() * self._rope_factor).to(x.dtype)
        sin = (angles.sin() * self._rope_factor).to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMS norm, its square mean in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.spec.eps)
        return self._t[name] * wide.to(x.dtype)


def attend(query: torch.Tensor, context: Keys, last: torch.Tensor, own: list[Keys]) -> torch.Tensor:
    """Attention of one sample's rows: [rows, heads x head_dim].

    ``query`` [heads, R, head_dim]. Row r sees the context's keys 0 .. last[r] (depth 0, causal; ``last`` [R] ascends,
    on the CPU) and, of each later depth, its own row's key alone: ``own`` [kv heads, R, head_dim]. Scores are held for
    few rows at a time, whatever the length of the context.
    """
    (heads, rows, head_dim), dtype = query.shape, query.dtype
    if (
        query.device.type == "cpu" and query.dtype != torch.float64
    ):  # CPUs multiply batches of 16-bit floats very slowly
        wide = (Keys(one.keys.float(), one.values.float()) for one in (context, *own))
        query, context, own = query.float(), next(wide), list(wide)
    kv_heads = context.keys.shape[0]
    block = max(1, SCORE_ELEMENTS // (heads * (int(last[-1]) + 1 + len(own))))
    grouped = query.view(kv_heads, heads // kv_heads, rows, head_dim) * head_dim**-0.5
    found = query.new_empty(rows, heads, head_dim)
    for start in range(0, rows, block):
        stop = min(rows, start + block)
        least, seen = int(last[start]) + 1, int(last[stop - 1]) + 1
        part = grouped[:, :, start:stop].reshape(kv_heads, -1, head_dim)
        scores = (part @ context.keys[:, :seen].transpose(1, 2)).view(kv_heads, -1, stop - start, seen)
        later = torch.arange(least, seen) > last[start:stop, None]
        scores[..., least:].masked_fill_(later.to(query.device), float("-inf"))
        if own:
            part = part.view(kv_heads, -1, stop - start, head_dim)
            self_scores = [(part * one.keys[:, None, start:stop]).sum(-1, keepdim=True) for one in own]
            scores = torch.cat([scores, *self_scores], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        flat = weights[..., :seen].reshape(kv_heads, -1, seen)
        mixed = (flat @ context.values[:, :seen]).view(kv_heads, -1, stop - start, head_dim)
        for i, one in enumerate(own):
            mixed = mixed + weights[..., seen + i, None] * one.values[:, None, start:stop]
        found[start:stop] = mixed.view(heads, stop - start, head_dim).transpose(0, 1)
    return found.view(rows, -1).to(dtype)
