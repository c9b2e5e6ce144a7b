"""Other ways to read an EAGLE-3 checkpoint: what a wrong flag, id or export would have meant.

Each is a mistake that changes no shape and raises no error, in a trainer's export or in an engine's loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from driftwatch.shadow.causal import Causal
from driftwatch.shadow.eagle3.checkpoint import Checkpoint
from driftwatch.shadow.eagle3.spec import Rope


@dataclass(frozen=True)
class Reading:
    """Another reading, and what is wrong if it is the one that fits."""

    name: str
    cause: str
    checkpoint: Checkpoint


def other_readings(checkpoint: Checkpoint, model: Causal) -> Iterator[Reading]:
    """The readings that differ from how the checkpoint is loaded, on this target."""
    spec = checkpoint.spec
    aux = spec.layers(model.layers)

    def changed(name: str, cause: str, **values: object) -> Reading:
        return Reading(name, cause, replace(checkpoint, spec=replace(spec, **values)))  # type: ignore[arg-type]

    if min(aux) > 0:
        lower = tuple(index - 1 for index in aux)
        cause = f"its layer ids are one too high: it was trained on hidden_states {list(lower)}"
        yield changed("target layers one lower", cause, aux=lower)
    if max(aux) < model.layers:
        higher = tuple(index + 1 for index in aux)
        cause = f"its layer ids are one too low: it was trained on hidden_states {list(higher)}"
        yield changed("target layers one higher", cause, aux=higher)
    flag = not spec.norm_before_residual
    cause = f"norm_before_residual is missing or wrong in config.json: it was trained with {str(flag).lower()}"
    yield changed("norm_before_residual turned", cause, norm_before_residual=flag)
    if spec.last_norm:
        flag = not spec.norm_output
        cause = (
            f"norm_output is missing or wrong in config.json: it was trained with {str(flag).lower()} as engines read"
        )
        yield changed("norm_output turned", cause, norm_output=flag)
    cause = "the concatenation is swapped: it was trained on [hidden ; embedding], engines feed [embedding ; hidden]"
    yield changed("concatenation swapped", cause, hidden_first=not spec.hidden_first)
    theta = target_theta(model)
    if theta is not None and theta != spec.rope.theta:
        cause = f"rope_theta is missing or wrong in config.json: it was trained with the target's, {theta:g}"
        yield changed("the target's rope_theta", cause, rope=Rope(theta, spec.rope.scaling, spec.rope.max_positions))
    if spec.embedding == "own" and model.embedding.shape[1] == spec.hidden:
        cause = "its embed_tokens.weight is not what it was trained with; the target's own embedding is"
        yield changed("the target's embedding", cause, embedding="target")


def target_theta(model: Causal) -> float | None:
    found = getattr(model.config, "rope_parameters", None) or {}
    theta = found.get("rope_theta", getattr(model.config, "rope_theta", None))
    return None if theta is None else float(theta)


def embedding_rows_apart(checkpoint: Checkpoint, model: Causal) -> int | None:
    """Rows of the head's own embedding that are not the target's, beyond the rounding of 16-bit floats; None where it
    brings none, or one of another width."""
    own = checkpoint.tensors.get("embed_tokens.weight")
    if own is None or own.shape[1] != model.embedding.shape[1]:
        return None
    rows = min(len(own), len(model.embedding))
    mine, theirs = own[:rows].float(), model.embedding.detach()[:rows].float().cpu()
    same = torch.isclose(mine, theirs, rtol=0.01, atol=1e-3 * float(theirs.abs().max())).all(dim=1)
    return int((~same).sum())
