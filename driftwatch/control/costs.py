"""What a window of a draft costs, in plain decode steps: from a cost profile, or a break-even that somebody entered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import yaml

from driftwatch.economics.entered import entered
from driftwatch.economics.profile import Cost, CostProfile
from driftwatch.economics.shape import CHAIN, Shape
from driftwatch.errors import ProfileError
from driftwatch.settings import Draft, Model, Settings

LARGEST = 4_000_000
"""Bytes of a profile: an engine's readings of a week are fewer."""


@dataclass(frozen=True)
class Costs:
    """Of one draft of one model; exactly one of the first two is there."""

    profile: CostProfile | None
    entered: float | None
    """gamma c + v at the model's gamma, whatever the load."""
    shape: Shape | None = None
    """How the draft makes its proposals, as far as its name says (of a block draft only its checkpoint would); None
    where it has no path, and for prompt lookup, which is priced without the profile's draft."""

    def at(self, batch: float, proposals: float, context: float | None = None) -> Cost:
        """Costs of a window with so many proposals on the mean."""
        if self.profile is not None:
            return self.profile.cost(batch, proposals, context)
        return Cost(batch, proposals, context or 0.0, 1.0, 0.0, float(self.entered or 0.0), "entered")

    def level(self, gamma: int) -> float | None:
        """Break-even of the tests: at a batch of one, so that it stands still. None where no draft can miss or meet it.

        What a larger batch adds is taken off each request's own length (``observed``).
        """
        level = self.at(1.0, float(gamma)).window
        return level if 1.0 < level <= 1.0 + gamma else None

    def mismatches(self, fingerprint: str, facts: Mapping[str, Any]) -> tuple[str, ...]:
        """In what a cell is known to differ from what the profile was made for; the device and the target's weights
        are not known here."""
        if self.profile is None:
            return ()
        bound, found = self.profile.bound, []
        if bound.draft and fingerprint and self.profile.draft_provenance != "entered" and bound.draft != fingerprint:
            found.append(f"the draft's weights are {fingerprint[:12]}, the profile is of {bound.draft[:12]}")
        dtype = str(facts.get("dtype", ""))
        if bound.dtype and dtype and dtype.removeprefix("torch.") != bound.dtype:
            found.append(f"the target runs in {dtype}, the profile is of {bound.dtype}")
        made, priced = self.shape, self.profile.shape
        if made is not None and made != priced and "tree" in (made.kind, priced.kind):
            found.append(f"the draft makes {made.described}, and is priced as {priced.described}")
        return tuple(found)

    def origin(self) -> dict[str, Any]:
        """Where the costs come from, for whoever reads a figure that rests on them."""
        if self.profile is None:
            return {"costs": "entered", "break_even": self.entered}
        bound, error = self.profile.bound, self.profile.error
        return {
            "costs": self.profile.origin,
            "device": bound.device,
            "dtype": bound.dtype,
            "target": bound.target,
            "draft": bound.draft,
            "priced_as": str(self.profile.shape),
            "fit_error": None if error is None else asdict(error),
            "not_compared": ["device", "target"],
        }


def of(model: Model, draft: str) -> Costs | None:
    """Of a draft by its name; None where nothing is known. The profile is read once. Raises ProfileError.

    Prompt lookup proposes at no cost, whatever the profile's own draft costs.
    """
    found = next((one for one in model.drafts if one.name == draft), None)
    if model.profile is None:
        return None if model.break_even is None or found is None else Costs(None, model.break_even)
    profile = _read_once(model.profile)
    if found is not None and is_lookup(found):
        return Costs(profile.with_draft(0.0), None)
    if found is None or profile.draft is None:
        return None
    return Costs(profile, None, None if found.path is None else Shape.of_draft(found.path) or CHAIN)


def is_lookup(draft: Draft) -> bool:
    """Whether a draft is the request's own text (n-gram), and not trained."""
    return draft.path is not None and draft.path.partition(":")[0] == "ngram"


def check(settings: Settings) -> None:
    """Read every profile. Raises ProfileError naming the file and what to do."""
    for model in settings.models:
        if model.profile is None:
            continue
        if _read_once(model.profile).draft is None and not all(map(is_lookup, model.drafts)):
            raise ProfileError(f"{model.profile} has no draft: make it with `driftwatch profile --target T --draft D`")


def read_profile(path: Path) -> CostProfile:
    """A saved profile, or costs entered by hand (YAML or JSON). Raises ProfileError naming the file."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror or error}; make one with `driftwatch profile`") from None
    if len(text) > LARGEST:
        raise ProfileError(f"{path}: over {LARGEST / 1e6:g} MB, as no profile is; make one with `driftwatch profile`")
    data = _parsed(path, text)
    try:
        if not isinstance(data, dict):
            raise ProfileError("holds no keys; make one with `driftwatch profile`")
        return CostProfile.from_json(data) if "format" in data else entered(data)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def _parsed(path: Path, text: bytes) -> Any:
    """What is written in either; JSON first, since reading it as YAML takes a hundred times as long."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        return yaml.safe_load(text.decode())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ProfileError(f"{path}: neither JSON nor YAML: {' '.join(str(error).split())}") from None


_read_once = cache(read_profile)
