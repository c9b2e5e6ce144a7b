"""Other ways to read a block, parallel or native draft: what a wrong id or flag would have meant.

Each is a mistake that changes no shape and raises no error, in a trainer's export or in an engine's loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from driftwatch.shadow.block.peagle import PEagleSpec
from driftwatch.shadow.block.replay import BlockDraft
from driftwatch.shadow.causal import Causal
from driftwatch.shadow.eagle3.readings import target_theta
from driftwatch.shadow.eagle3.spec import Rope


@dataclass(frozen=True)
class Reading:
    """Another reading, and what is wrong if it is the one that fits."""

    name: str
    cause: str
    spec: Any


def other_readings(draft: BlockDraft, model: Causal) -> Iterator[Reading]:
    """The readings that differ from how the draft is loaded, on this target."""
    spec = draft.spec
    if draft.layers:
        for step, side, wrong in ((-1, "lower", "high"), (1, "higher", "low")):
            layers = tuple(index + step for index in draft.layers)
            if min(layers) >= 0 and max(layers) <= model.layers:
                cause = f"its layer ids are one too {wrong}: it was trained on hidden_states {list(layers)}"
                read = replace(spec, reads=replace(spec.reads, layers=layers))
                yield Reading(f"target layers one {side}", cause, read)
    if isinstance(spec, PEagleSpec):
        flag = not spec.norm_before_residual
        cause = f"norm_before_residual is missing or wrong in config.json: it was trained with {str(flag).lower()}"
        yield Reading("norm_before_residual turned", cause, replace(spec, norm_before_residual=flag))
    theta, rope = target_theta(model), spec.layer.rope
    if theta is not None and theta != rope.theta:
        cause = f"rope_theta is missing or wrong in config.json: it was trained with the target's, {theta:g}"
        layer = replace(spec.layer, rope=Rope(theta, rope.scaling, rope.max_positions))
        yield Reading("the target's rope_theta", cause, replace(spec, layer=layer))


def described(draft: BlockDraft, target_layers: int) -> str:
    """One line: what the draft is."""
    reads, layer = draft.spec.reads, draft.spec.layer
    source = "the last hidden states" if draft.layers is None else f"hidden_states {list(draft.layers)}"
    own = draft.checkpoint.tensors
    embedding, head = ("own" if name in own else "target" for name in ("embed_tokens.weight", "lm_head.weight"))
    slots = f"{reads.slots} proposals a window" if reads.slots else "as many proposals as asked for"
    mask = "" if reads.mask is None else f"mask token {reads.mask}; "
    return (
        f"from SpecForge: {layer.heads} heads of {layer.head_dim}, {layer.kv_heads} kv heads; reads {source} of "
        f"{target_layers} layers; {slots}, replayed at every start; {mask}rope_theta {layer.rope.theta:g}; embedding: "
        f"{embedding}, head: {head}"
    )
