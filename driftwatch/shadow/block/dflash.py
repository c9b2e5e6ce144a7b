"""DFlash (arXiv 2602.06036): a block of masks behind the last verified token, filled in at once.

The forward pass is that of SpecForge 0.2.0 (``modeling/draft/dflash.py``, masks of ``dflash_family_model.py``). The
projected target layers are the keys and values of every layer, at positions 0, 1, ...; they are not normed there. A
block at the anchor a holds x[a] and B - 1 mask tokens, embedded by the target, at positions a .. a + B - 1, and sees
the context strictly before a: the engine has not run the target over x[a] yet. In a full layer its slots see each
other, in a sliding one those up to their own and the window before it. Slot j >= 1 proposes x[a + j], through the
target's output head: depth j - 1.

The block is always whole: a smaller gamma is the first proposals of it, which is what an engine gives that drafts the
whole block (SGLang). One that shortens the block to the proposals asked for has other slots to see.
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
from driftwatch.shadow.block.head import Kind, Reads, pieces
from driftwatch.shadow.block.layer import Layer, LayerSpec, Norm


@dataclass(frozen=True)
class DFlashSpec:
    """Shapes and conventions of one draft."""

    reads: Reads
    layer: LayerSpec
    windows: tuple[int | None, ...]
    """Of each layer: how far it sees, None for all."""
    block: int
    mask: int


def read(folder: Path) -> tuple[DFlashSpec, Checkpoint]:
    """A SpecForge export. Raises ModelError, one line, naming what is missing, unknown or impossible."""
    stored = Stored(folder)
    return take(stored, "dflash"), stored.close()


def take(stored: Stored, projector: Kind) -> DFlashSpec:
    """The block's own part of a checkpoint of that projector type. Raises ModelError as ``read`` does."""
    config, method = stored.config, stored.config.part("dflash_config")
    if method.get("projector_type") not in (None, projector):
        raise ModelError(
            f"{stored.what}: dflash_config.projector_type is {method.get('projector_type')!r}, not {projector}"
        )
    depth, hidden, block = (config.count(key) for key in ("num_hidden_layers", "hidden_size", "block_size"))
    if block < 2:
        raise ModelError(f"{stored.what}: config.json: block_size is {block}, which leaves nothing to propose")
    mask = method.index("mask_token_id")
    if mask is None:
        raise ModelError(
            f"{stored.what}: config.json names no dflash_config.mask_token_id; write the one it was trained with"
        )
    ids = method.indices("target_layer_ids")
    if ids is None:
        ids = default_layer_ids(config.count("num_target_layers"), depth)
        stored.inferred.append("no target_layer_ids in config.json: the default ones")
    layers = stored.layer_ids(ids)
    spec = stored.layer_spec()
    for i in range(depth):
        stored.take_layer(f"layers.{i}.", spec, hidden, qk_norm=True)
    stored.take("fc.weight", hidden, len(layers) * hidden)
    for name in ("hidden_norm", "norm"):
        stored.take(f"{name}.weight", hidden)
    reads = Reads(projector, layers, hidden, slots=block - 1, mask=mask)
    return DFlashSpec(reads, spec, _windows(stored, depth), block, mask)


def default_layer_ids(target_layers: int, layers: int) -> tuple[int, ...]:
    """SpecForge's choice: the middle one, or as many as the draft has layers, evenly from 1 to N - 3."""
    if layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers))


def _windows(stored: Stored, depth: int) -> tuple[int | None, ...]:
    kinds = stored.config.get("layer_types") or ["full_attention"] * depth
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != depth or not all(kind in known for kind in kinds):
        raise ModelError(f"{stored.what}: config.json: layer_types {kinds} do not name {depth} full or sliding layers")
    return tuple(stored.config.count("sliding_window") if kind == "sliding_attention" else None for kind in kinds)


class DFlashHead:
    """The draft's tensors and ``embed_tokens.weight``, the target's, on one device."""

    def __init__(self, spec: DFlashSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        self.spec = spec
        self._mask = tensors["embed_tokens.weight"][spec.mask]
        self._layers = [Layer(spec.layer, tensors, f"layers.{i}.") for i in range(len(spec.windows))]
        self._fc = tensors["fc.weight"]
        self._hidden_norm, self._norm = (
            Norm(tensors[f"{name}.weight"], spec.layer) for name in ("hidden_norm", "norm")
        )

    @property
    def reads(self) -> Reads:
        return self.spec.reads

    def project(self, layers: Sequence[torch.Tensor]) -> torch.Tensor:
        joined = torch.cat([layer.to(self._fc.device, self._fc.dtype) for layer in layers], dim=-1)
        return self._hidden_norm(F.linear(joined, self._fc))

    def context(self, states: torch.Tensor, embedded: torch.Tensor) -> list[Keys]:
        """Of each layer the keys of all positions."""
        at = torch.arange(len(states), device=states.device)
        found = []
        for layer in self._layers:
            parts = [layer.keys(states[part], at[part]) for part in pieces(len(states))]
            found.append(joined(parts))
        return found

    def propose(
        self, context: list[Keys], embedded: torch.Tensor, at: torch.Tensor, depths: int
    ) -> Iterator[torch.Tensor]:
        yield from self.block(context, embedded, at)[:, 1 : depths + 1].unbind(dim=1)

    def block(self, context: list[Keys], embedded: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """[R, B, hidden]: what comes of every slot, normed."""
        block = self.spec.block
        slots = torch.arange(block, device=at.device)
        positions = at[:, None] + slots
        x = self._mask.expand(len(at), block, -1).clone()
        x[:, 0] = embedded[at]
        for layer, window, keys in zip(self._layers, self.spec.windows, context, strict=True):
            normed = layer.input_norm(x)
            query, gate = layer.query(normed, positions)
            mask = slots <= (slots[:, None] if window is not None else block)
            x = layer.finish(x, attend(query, keys, at, layer.keys(normed, positions), mask, window), gate)
        return self._norm(x)
