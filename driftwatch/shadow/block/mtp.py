"""Multi-token prediction: the native head of a Qwen3.5 target, fine-tuned by SpecForge (``Qwen3_5MTPDraftModel``).

One decoder layer of the target's own kind. Row s is fed token x[s + 1] and, at depth 0, the target's last hidden state
at s after its final norm, later its own output after its own norm; both are normed and joined, embedding first, and
projected. It proposes x[s + 2 + depth] through the target's output head, and sees the depth-0 keys of rows 0 .. s and
its own of later depths: engines run it over the verified tokens with the target's states again (vLLM's
``Qwen3_5MTP``), as for EAGLE. Layer and norms are those of transformers 5.24's Qwen3.5: norms scale by 1 + weight, the
queries come with a gate, a part of each head is rotated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from driftwatch.errors import ModelError
from driftwatch.shadow.block.attention import Keys, attend, joined
from driftwatch.shadow.block.checkpoint import Checkpoint, Stored
from driftwatch.shadow.block.head import Reads, pieces
from driftwatch.shadow.block.layer import Layer, LayerSpec, Norm

FUSION = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


@dataclass(frozen=True)
class MTPSpec:
    """Shapes and conventions of one head."""

    reads: Reads
    layer: LayerSpec


def read(folder: Path) -> tuple[MTPSpec, Checkpoint]:
    """A SpecForge checkpoint (``--to hf``): tensors ``mtp.*``, and the target's embedding and output head or copies of
    them. Raises ModelError, one line, naming what is missing, unknown or impossible."""
    stored = Stored(folder)
    config = stored.config
    hidden, vocabulary = config.count("hidden_size"), config.count("vocab_size")
    depth = config.count("num_hidden_layers", 1)
    if depth != 1:
        raise ModelError(f"{stored.what}: num_hidden_layers is {depth}; MTP heads of one layer are supported")
    spec = stored.layer_spec(gated=config.flag("attn_output_gate"), offset=1.0)
    stored.inferred.append("its norms scale by 1 + weight, as Qwen3.5's do")
    stored.take_layer("mtp.layers.0.", spec, hidden, qk_norm=True)
    stored.take("mtp.fc.weight", hidden, 2 * hidden)
    for name in FUSION:
        stored.take(f"mtp.{name}.weight", hidden)
    for name, source in (("embed_tokens", "embedding"), ("mtp.lm_head", "output head")):
        if stored.take_any(f"{name}.weight", vocabulary, hidden) is None:
            stored.inferred.append(f"no {name}.weight: the target's {source} is used")
    if (own := stored.taken.pop("mtp.lm_head.weight", None)) is not None:
        stored.taken["lm_head.weight"] = own
    return MTPSpec(Reads("mtp", None, hidden), spec), stored.close()


@dataclass(frozen=True)
class _Context:
    fused: torch.Tensor
    """[T - 1, hidden]: the layer's depth-0 inputs."""
    keys: Keys


class MTPHead:
    """The head's tensors on one device, and what it computes with them."""

    def __init__(self, spec: MTPSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        self.spec = spec
        self._layer = Layer(spec.layer, tensors, "mtp.layers.0.")
        self._fc = tensors["mtp.fc.weight"]
        self._embedding_norm, self._hidden_norm, self._norm = (
            Norm(tensors[f"mtp.{name}.weight"], spec.layer) for name in FUSION
        )

    @property
    def reads(self) -> Reads:
        return self.spec.reads

    def project(self, layers: Sequence[torch.Tensor]) -> torch.Tensor:
        (last,) = layers
        return last.to(self._fc.device, self._fc.dtype)

    def context(self, states: torch.Tensor, embedded: torch.Tensor) -> _Context:
        rows = len(states) - 1
        at = torch.arange(rows, device=states.device)
        fused = torch.cat([self._fuse(states[part], embedded[1:][part]) for part in pieces(rows)])
        parts = [self._layer.keys(self._layer.input_norm(fused[part]), at[part]) for part in pieces(rows)]
        return _Context(fused, joined(parts))

    def propose(
        self, context: _Context, embedded: torch.Tensor, at: torch.Tensor, depths: int
    ) -> Iterator[torch.Tensor]:
        row = at - 1
        own: list[Keys] = []
        x = context.fused[row]
        for depth in range(depths):
            normed = self._layer.input_norm(x)
            query, gate = self._layer.query(normed, row + depth)
            if depth > 0:
                own.append(self._layer.keys(normed, row + depth))
            attended = attend(query[:, :, None], context.keys, row + 1, *_stacked(own))[:, 0]
            out = self._norm(self._layer.finish(x, attended, gate))
            yield out
            fed = embedded[(at + depth + 1).clamp(max=len(embedded) - 1)]  # behind the end no row is judged
            x = self._fuse(out, fed)

    def _fuse(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.cat([self._embedding_norm(embedded), self._hidden_norm(hidden)], dim=-1), self._fc)


def _stacked(own: list[Keys]) -> tuple[Keys | None, torch.Tensor | None]:
    """Keys of later depths [kv heads, R, head_dim] each as slots of their windows, all of which may be seen."""
    if not own:
        return None, None
    keys, values = torch.stack([one.keys for one in own], dim=2), torch.stack([one.values for one in own], dim=2)
    return Keys(keys, values), torch.ones(1, len(own), dtype=torch.bool, device=keys.device)
