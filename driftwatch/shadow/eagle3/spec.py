"""What an EAGLE-3 head computes, in one form for every trainer's checkpoints.

Three conventions change a head's results without changing the shape of any tensor: which layers of the target it
reads, which of its norms are applied where, and its rotary embedding. All are explicit here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from driftwatch.errors import ModelError
from driftwatch.shadow.config import Config

Origin = Literal["SpecForge", "EAGLE", "speculators", "Model-Optimizer"]
Source = Literal["own", "target"]

SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn")
"""Rotary types that draft configurations carry; ``mrope`` is ``default`` on text."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, from the draft's own configuration and never from the target's."""

    theta: float
    scaling: Mapping[str, Any] = field(default_factory=dict)
    """``rope_type`` and its parameters, as Hugging Face configurations write them; empty is the plain form."""
    max_positions: int = 2048

    @classmethod
    def from_config(cls, config: Config) -> Rope:
        """``rope_parameters`` first, then ``rope_theta`` and ``rope_scaling``, as SpecForge and engines read them.

        Without a theta it is 10,000. Raises ModelError for a type that is not known here, or lacks what it needs.
        """
        written = config.part("rope_parameters" if config.get("rope_parameters") else "rope_scaling")
        theta = written.real("rope_theta", config.real("rope_theta", 10_000.0))
        kind = written.get("rope_type") or written.get("type") or "default"
        if kind == "mrope":
            kind = "default"
        if kind not in SCALINGS:
            known = ", ".join(SCALINGS)
            raise ModelError(f"{config.what}: rotary embedding of type {kind!r} is not known; known are {known}")
        extra = {"rope_type": kind, **written.without("rope_theta", "rope_type", "type")} if kind != "default" else {}
        rope = cls(theta, extra, config.count("max_position_embeddings", 2048))
        try:
            rope.frequencies(64)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise ModelError(
                f"{config.what}: config.json: no rotary embedding can be made of {extra} ({error})"
            ) from None
        return rope

    def frequencies(self, head_dim: int) -> tuple[torch.Tensor, float]:
        """Inverse frequencies [head_dim / 2] in float32, and the factor on cosine and sine.

        The dynamic type grows with the longest sequence seen in transformers, so that a result would depend on its
        batch. Engines fix it at the longest sequence that they allow, max_position_embeddings x factor; so is it here.
        """
        make: Any = LlamaConfig
        config = make(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=self.max_positions,
            rope_theta=self.theta,
            rope_scaling=dict(self.scaling) or None,
        )
        if self.scaling.get("rope_type") == "dynamic":
            longest = int(self.max_positions * float(self.scaling.get("factor", 1.0)))
            inverse, factor = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=longest)
        else:
            built: Any = LlamaRotaryEmbedding(config)
            inverse, factor = built.inv_freq, built.attention_scaling
        return inverse.float(), float(factor)


@dataclass(frozen=True)
class Eagle3Spec:
    """Shapes, conventions and sources of one EAGLE-3 head.

    The layer, with e the fed token's embedding and h the hidden state fed (the projected target layers at depth 0,
    its own output at later depths)::

        x = [input_layernorm(e) ; hidden_norm(h)]           (embedding first, unless hidden_first)
        r = h, or hidden_norm(h) with norm_before_residual
        o = r + attention(x);  o = o + mlp(post_attention_layernorm(o))
        logits = lm_head(norm(o));  fed on: o, or norm(o) with norm_output
    """

    origin: Origin
    hidden: int
    target_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    """Rows of its own output head, Vd."""
    target_vocabulary: int
    eps: float
    activation: str
    rope: Rope
    aux: tuple[int, ...] | None
    """Target layers read, as indices into Hugging Face's ``hidden_states`` (0 is the embedding's output, i the input
    of layer i counted from 0); None is the default of every trainer, :func:`default_layers`."""
    aux_count: int = 3
    fc_norm: bool = False
    """A norm on each of the layers before the projection (EAGLE 3.1)."""
    norm_before_fc: bool = False
    """One norm over the concatenated layers before the projection."""
    norm_before_residual: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    last_norm: bool = True
    hidden_first: bool = False
    """The concatenation the other way round: no trainer does this; the self-test tries it."""
    embedding: Source = "target"
    head: Source = "own"
    first_position: int = 0

    def layers(self, target_layers: int) -> tuple[int, ...]:
        """The layers read of a target with so many. Raises ModelError if it has not as many."""
        aux = self.aux if self.aux is not None else default_layers(target_layers)
        if self.origin == "Model-Optimizer" and max(aux) == target_layers + 1:
            aux = tuple(index - 1 for index in aux)  # ids that reach N were boundaries already
        if len(aux) != self.aux_count or max(aux) > target_layers or min(aux) < 0:
            raise ModelError(f"the draft reads target layers {list(aux)}, the target has {target_layers} layers")
        return aux


def default_layers(target_layers: int) -> tuple[int, int, int]:
    """What trainers and engines read unless told otherwise: hidden_states [2, N / 2, N - 3]."""
    return 2, target_layers // 2, target_layers - 3
