"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head of several layers whose depths all come from one pass.

The forward pass is that of SpecForge 0.2.0 (``modeling/draft/peagle.py`` and the mask of ``algorithms/peagle``), its
data shifted as EAGLE-3's: the item of row p at depth 0 is fed token x[p + 1] and the projected target layers at p, and
proposes x[p + 2]; at depth d >= 1 it is fed the mask token and a learnt hidden state instead, at position p + d, and
proposes x[p + 2 + d]. An item sees the depth-0 items of rows 0 .. p and those of its own row up to its depth. Rotary
scaling is ignored there, so here too.
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
from driftwatch.shadow.eagle3.spec import Rope
from driftwatch.shadow.eagle3.vocabulary import read_map

MASK_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")
"""Where config.json names the mask token, as vLLM 0.33 looks for it; SpecForge writes none of them by itself."""


@dataclass(frozen=True)
class PEagleSpec:
    """Shapes and conventions of one head."""

    reads: Reads
    layer: LayerSpec
    layers: int
    mask: int
    norm_before_residual: bool


def read(folder: Path) -> tuple[PEagleSpec, Checkpoint]:
    """A SpecForge export. Raises ModelError, one line, naming what is missing, unknown or impossible."""
    stored = Stored(folder)
    config = stored.config
    hidden, depth, vocabulary = (config.count(key) for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    width = config.count("target_hidden_size", hidden)
    rows = config.count("draft_vocab_size", vocabulary)
    plain = Rope.from_config(config)
    spec = stored.layer_spec(rope=Rope(plain.theta, {}, plain.max_positions))
    for i in range(depth):
        stored.take_layer(f"layers.{i}.", spec, hidden * (2 if i == 0 else 1), qk_norm=False)
    stored.take("layers.0.hidden_norm.weight", hidden)
    stored.take("fc.weight", hidden, 3 * width)
    stored.take("mask_hidden", 1, 1, 3 * width)
    stored.take("norm.weight", hidden)
    stored.take("embed_tokens.weight", vocabulary, hidden)
    stored.take("lm_head.weight", rows, hidden)
    to_target = read_map(stored.left.pop("d2t", None), stored.left.pop("t2d", None), rows, vocabulary, stored.what)
    named = config.part("eagle_config").indices("eagle_aux_hidden_state_layer_ids")
    if named is not None and len(named) != 3:
        raise ModelError(f"{stored.what}: config.json: {list(named)} are not the ids of 3 target layers")
    if named is None:
        stored.inferred.append("no layer ids in config.json: the default layers, hidden_states [2, N/2, N-3]")
    layers = () if named is None else stored.layer_ids(named)
    mask = _mask(stored, vocabulary)
    reads = Reads("peagle", layers, width, mask=mask)
    flag = config.flag("norm_before_residual")
    return PEagleSpec(reads, spec, depth, mask, flag), stored.close(to_target)


def _mask(stored: Stored, vocabulary: int) -> int:
    places = [
        *(stored.config.index(key) for key in MASK_KEYS),
        stored.config.part("dflash_config").index("mask_token_id"),
    ]
    found = next((place for place in places if place is not None), None)
    if found is None or found >= vocabulary:
        problem = "names no mask token" if found is None else f"names mask token {found} of {vocabulary}"
        raise ModelError(f"{stored.what}: config.json {problem}; write the one it was trained with as pard_token")
    return found


@dataclass(frozen=True)
class _Context:
    keys: list[Keys]
    """Of each layer, of the depth-0 items."""
    out: torch.Tensor
    """[T - 1, hidden]: what comes of the depth-0 items, which is the first proposal."""


class PEagleHead:
    """The head's tensors on one device, and what it computes with them."""

    def __init__(self, spec: PEagleSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        self.spec = spec
        self._layers = [Layer(spec.layer, tensors, f"layers.{i}.") for i in range(spec.layers)]
        self._hidden_norm = self._layers[0].norm("hidden_norm")
        self._norm = Norm(tensors["norm.weight"], spec.layer)
        self._fc = tensors["fc.weight"]
        self._mask = tensors["embed_tokens.weight"][spec.mask]
        self._mask_hidden = F.linear(tensors["mask_hidden"][0, 0], self._fc)

    @property
    def reads(self) -> Reads:
        return self.spec.reads

    def project(self, layers: Sequence[torch.Tensor]) -> torch.Tensor:
        return F.linear(torch.cat([layer.to(self._fc.device, self._fc.dtype) for layer in layers], dim=-1), self._fc)

    def context(self, states: torch.Tensor, embedded: torch.Tensor) -> _Context:
        rows = len(states) - 1
        at = torch.arange(rows, device=states.device)
        x, found = states[:rows], []
        for i, layer in enumerate(self._layers):
            inputs = [self._inputs(i, x[part], embedded[1:][part]) for part in pieces(rows)]
            parts = [layer.keys(normed, at[part]) for (normed, _), part in zip(inputs, pieces(rows), strict=True)]
            keys = joined(parts)
            found.append(keys)
            out = []
            for (normed, residual), part in zip(inputs, pieces(rows), strict=True):
                query, _ = layer.query(normed, at[part])
                out.append(layer.finish(residual, attend(query[:, :, None], keys, at[part] + 1)[:, 0]))
            x = torch.cat(out)
        return _Context(found, self._norm(x))

    def propose(
        self, context: _Context, embedded: torch.Tensor, at: torch.Tensor, depths: int
    ) -> Iterator[torch.Tensor]:
        row = at - 1
        yield context.out[row]
        if depths == 1:
            return
        depth = torch.arange(1, depths, device=at.device)
        positions = row[:, None] + depth
        x = self._mask_hidden.expand(len(at), depths - 1, -1)
        mask = depth <= depth[:, None]
        for i, (layer, keys) in enumerate(zip(self._layers, context.keys, strict=True)):
            normed, residual = self._inputs(i, x, self._mask.expand_as(x))
            query, _ = layer.query(normed, positions)
            x = layer.finish(residual, attend(query, keys, row + 1, layer.keys(normed, positions), mask))
        yield from self._norm(x).unbind(dim=1)

    def _inputs(self, i: int, x: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What layer i's projections read, and its residual."""
        if i > 0:
            return self._layers[i].input_norm(x), x
        hidden = self._hidden_norm(x)
        joined = torch.cat([self._layers[0].input_norm(embedded), hidden], dim=-1)
        return joined, hidden if self.spec.norm_before_residual else x
