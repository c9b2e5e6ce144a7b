"""Reading a draft's checkpoint folder, every tensor accounted for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.activations import ACT2FN

from driftwatch.errors import ModelError
from driftwatch.shadow.block.layer import LayerSpec
from driftwatch.shadow.config import Config, read_config
from driftwatch.shadow.draft import hash_weights
from driftwatch.shadow.eagle3.spec import Rope
from driftwatch.shadow.weights import read_tensors


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds: its tensors on the CPU as stored, and what had to be inferred to read them."""

    path: Path
    sha256: str
    tensors: Mapping[str, torch.Tensor]
    to_target: torch.Tensor | None
    """[Vd] absolute target ids; None where the draft has the whole vocabulary."""
    inferred: tuple[str, ...]
    ignored: tuple[str, ...]

    @property
    def what(self) -> str:
        return f"draft {self.path}"

    @property
    def parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values() if tensor.is_floating_point())


class Stored:
    """A folder that is being read: tensors are taken out of it by name, and none may be left at the end."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError if the folder cannot be read or holds quantised weights."""
        self.path, self.what = folder, f"draft {folder}"
        self.config: Config = read_config(folder)
        self.sha256 = hash_weights(folder)
        if (folder / "hf_quant_config.json").exists() or "quantization_config" in self.config:
            raise ModelError(f"{self.what}: it is quantised; export the draft unquantised (bf16 or fp16)")
        self.left = read_tensors(folder, self.what)
        self.taken: dict[str, torch.Tensor] = {}
        self.inferred: list[str] = []

    def layer_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Layer outputs counted from 0, as trainers write them, to indices into ``hidden_states``."""
        layers = tuple(i + 1 for i in ids)
        self.inferred.append(f"layer ids {list(ids)} are layer outputs: hidden_states {list(layers)}")
        return layers

    def layer_spec(self, *, gated: bool = False, offset: float = 0.0, rope: Rope | None = None) -> LayerSpec:
        """Of a layer as config.json describes it."""
        config = self.config
        heads = config.count("num_attention_heads")
        head_dim = config.count("head_dim", config.count("hidden_size") // heads)
        part = config.part("rope_parameters").real("partial_rotary_factor", config.real("partial_rotary_factor", 1.0))
        kv_heads = config.count("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ModelError(f"{self.what}: {heads} attention heads do not share {kv_heads} kv heads evenly")
        return LayerSpec(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            eps=config.real("rms_norm_eps", 1e-6),
            activation=config.choice("hidden_act", "silu", ACT2FN),
            rope=rope or Rope.from_config(config),
            rotated=int(head_dim * part),
            gated=gated,
            offset=offset,
        )

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Take out a tensor. Raises ModelError if it is not there, or of another shape."""
        found = self.take_any(name, *shape)
        if found is None:
            raise ModelError(f"{self.what}: tensor {name} is missing; is it a whole checkpoint?")
        return found

    def take_any(self, name: str, *shape: int) -> torch.Tensor | None:
        """Take out a tensor that may be missing."""
        found = self.left.pop(name, None)
        if found is None:
            return None
        if tuple(found.shape) != shape:
            has = list(found.shape)
            raise ModelError(
                f"{self.what}: tensor {name} has shape {has}, config.json and the others say {list(shape)}"
            )
        self.taken[name] = found
        return found

    def take_layer(self, prefix: str, spec: LayerSpec, width: int, *, qk_norm: bool) -> None:
        """A decoder layer whose projections read inputs ``width`` wide."""
        hidden, inner = self.config.count("hidden_size"), self.config.count("intermediate_size")
        query, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        projections = {"q_proj": query * (1 + spec.gated), "k_proj": keys, "v_proj": keys}
        for name, rows in projections.items():
            self.take(f"{prefix}self_attn.{name}.weight", rows, width)
            self.take_any(f"{prefix}self_attn.{name}.bias", rows)
        self.take(f"{prefix}self_attn.o_proj.weight", hidden, query)
        self.take_any(f"{prefix}self_attn.o_proj.bias", hidden)
        for name in ("q_norm", "k_norm") if qk_norm else ():
            self.take(f"{prefix}self_attn.{name}.weight", spec.head_dim)
        for name in ("gate_proj", "up_proj"):
            self.take(f"{prefix}mlp.{name}.weight", inner, hidden)
        self.take(f"{prefix}mlp.down_proj.weight", hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.take(f"{prefix}{name}.weight", hidden)

    def close(self, to_target: torch.Tensor | None = None) -> Checkpoint:
        """What was taken. Raises ModelError for a tensor that nothing asked for; rotary tables are ignored, since they
        are computed anew."""
        ignored = tuple(sorted(name for name in self.left if name.endswith(("rotary_emb.inv_freq", "_cached"))))
        unknown = sorted(set(self.left) - set(ignored))
        if unknown:
            raise ModelError(f"{self.what}: {len(unknown)} tensors belong to no part of it, the first is {unknown[0]}")
        return Checkpoint(self.path, self.sha256, self.taken, to_target, tuple(self.inferred), ignored)
