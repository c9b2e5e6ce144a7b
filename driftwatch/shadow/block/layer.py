"""One pre-norm decoder layer of a draft, its attention left to whoever knows what may see what.

The forms of Llama (plain), Qwen3 (norms on queries and keys) and Qwen3.5 (those, a gate on what attention gave, norms
that scale by 1 + weight, rotation of a part of each head) are those of transformers 5.24's ``models``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from driftwatch.shadow.block.attention import Keys
from driftwatch.shadow.eagle3.spec import Rope

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class LayerSpec:
    """What the shapes of a layer's tensors do not say."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    activation: str
    rope: Rope
    rotated: int
    """Leading entries of a head that are rotated; all but those of Qwen3.5 rotate ``head_dim``."""
    gated: bool = False
    """Queries come with a gate, sigmoid(gate) scales what attention gave (Qwen3.5)."""
    offset: float = 0.0
    """Added to the weight of every norm: 1 in Qwen3.5."""


class Norm:
    """RMS norm, its square mean in float32."""

    def __init__(self, weight: torch.Tensor, spec: LayerSpec) -> None:
        self._weight, self._eps, self._offset = weight, spec.eps, spec.offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        if self._offset:  # as Qwen3.5 rounds: after the weight
            return (wide * (self._weight.float() + self._offset)).to(x.dtype)
        return self._weight * wide.to(x.dtype)


class Layer:
    """The tensors of one layer under their own names (``self_attn.q_proj.weight``), and what it computes with them."""

    def __init__(self, spec: LayerSpec, tensors: Tensors, prefix: str) -> None:
        self.spec = spec
        self._t = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        self._act = ACT2FN[spec.activation]
        self.input_norm = self.norm("input_layernorm")
        self._post_norm = self.norm("post_attention_layernorm")
        qk_norm = "self_attn.q_norm.weight" in self._t
        self._q_norm = self.norm("self_attn.q_norm") if qk_norm else None
        self._k_norm = self.norm("self_attn.k_norm") if qk_norm else None
        inverse, self._rope_factor = spec.rope.frequencies(spec.rotated)
        self._inverse = inverse.to(self._t["self_attn.q_proj.weight"].device)

    def norm(self, name: str) -> Norm:
        return Norm(self._t[f"{name}.weight"], self.spec)

    def query(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries [heads, ..., head_dim] of normed inputs [..., H] at ``positions`` [...], and the gate if any."""
        mixed = self._linear("q_proj", x)
        gate = None
        if self.spec.gated:
            by_head = mixed.reshape(*mixed.shape[:-1], self.spec.heads, -1)
            mixed, gate = (half.flatten(-2) for half in by_head.chunk(2, dim=-1))
        query = self._split(mixed, self.spec.heads)
        if self._q_norm is not None:
            query = self._q_norm(query)
        return self._rotate(query, positions), gate

    def keys(self, x: torch.Tensor, positions: torch.Tensor) -> Keys:
        """Keys and values [kv heads, ..., head_dim] of inputs [..., H]."""
        keys, values = (self._split(self._linear(name, x), self.spec.kv_heads) for name in ("k_proj", "v_proj"))
        if self._k_norm is not None:
            keys = self._k_norm(keys)
        return Keys(self._rotate(keys, positions), values)

    def finish(self, residual: torch.Tensor, attended: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's output [..., H] from what attention gave, [..., heads x head_dim]."""
        if gate is not None:
            attended = attended * gate.sigmoid()
        out = residual + self._linear("o_proj", attended)
        x = self._post_norm(out)
        gate_up = (F.linear(x, self._t[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return out + F.linear(self._act(next(gate_up)) * next(gate_up), self._t["mlp.down_proj.weight"])

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._t[f"self_attn.{name}.weight"], self._t.get(f"self_attn.{name}.bias"))

    def _split(self, mixed: torch.Tensor, heads: int) -> torch.Tensor:
        return mixed.reshape(*mixed.shape[:-1], heads, self.spec.head_dim).movedim(-2, 0)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate-half form, angles in float32."""
        angles = positions[..., None].float() * self._inverse
        cos, sin = ((f(angles) * self._rope_factor).to(x.dtype) for f in (torch.cos, torch.sin))
        left, right = x[..., : self.spec.rotated].chunk(2, dim=-1)
        turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
        return torch.cat([turned, x[..., self.spec.rotated :]], dim=-1)
