"""Where the costs of a draft come from, and for whom they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from driftwatch.control import costs
from driftwatch.economics.profile import Bound, CostProfile
from driftwatch.economics.step import StepTime, Timing
from driftwatch.errors import ProfileError, SettingsError
from driftwatch.settings import Model, load

TRAINED, LOOKUP = {"name": "incumbent", "path": "x"}, {"name": "lookup", "path": "ngram:min=1,max=3"}
MEASURED = CostProfile.fitted(
    Bound("GPU-A", "bfloat16", "t", "abc"),
    [
        *(Timing("target", batch, 0.02 + 0.0001 * batch * (1 + g), g) for batch in (1, 8, 32) for g in (0, 3)),
        *(Timing("draft", batch, 0.002) for batch in (1, 8, 32)),
    ],
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(MEASURED.to_json()))
    return str(file)


def model(**given: Any) -> Model:
    return Model(**{"drafts": [TRAINED, LOOKUP], "gamma": 3} | given)


def test_a_profile_at_every_load_and_a_lookup_that_proposes_for_nothing(path: str) -> None:
    trained, lookup = (costs.of(model(profile=path), name) for name in ("incumbent", "lookup"))
    assert trained is not None
    assert lookup is not None
    for batch in (1.0, 32.0):
        step = 0.02 + 0.0001 * batch
        assert trained.at(batch, 3).window == pytest.approx((0.006 + 0.02 + 0.0004 * batch) / step)
        assert lookup.at(batch, 3).window == pytest.approx((0.02 + 0.0004 * batch) / step)
    assert trained.level(3) == pytest.approx(trained.at(1.0, 3).window)
    assert costs.of(model(profile=path), "of another model") is None


def test_one_number_holds_whatever_the_load() -> None:
    found = costs.of(model(break_even=2.0), "incumbent")
    assert found is not None
    assert (found.at(1.0, 3).window, found.at(64.0, 3).window, found.level(3)) == (2.0, 2.0, 2.0)
    assert found.mismatches("abc", {"dtype": "float16"}) == ()
    assert costs.of(model(), "incumbent") is None


def test_a_level_that_no_draft_can_miss_or_meet_is_no_test() -> None:
    free = costs.Costs(CostProfile.entered(MEASURED.bound, StepTime(0.02)).with_draft(0.0), None)
    dear = costs.Costs(CostProfile.entered(MEASURED.bound, StepTime(0.02)).with_draft(2.0), None)
    assert (free.level(3), dear.level(3)) == (None, None)


def test_what_the_profile_is_not_of_is_told(path: str) -> None:
    found = costs.of(model(profile=path), "incumbent")
    assert found is not None
    assert found.mismatches("abc", {"dtype": "torch.bfloat16"}) == ()
    weights, dtype = found.mismatches("other", {"dtype": "float16"})
    assert "abc" in weights
    assert "float16" in dtype
    assert found.mismatches("", {}) == (), "what is not known is no mismatch"
    origin = found.origin()
    assert (origin["costs"], origin["device"], origin["fit_error"]["points"]) == ("measured", "GPU-A", 9)


def test_two_ways_to_say_the_same_are_refused(tmp_path: Path, path: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(json.dumps({"models": [{"profile": path, "break_even": 2.0}]}))
    with pytest.raises(SettingsError, match="give one"):
        load(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 5000, "neither JSON nor YAML"),
        ("a: 2020-13-45", "neither JSON nor YAML"),
        ("a" * (costs.LARGEST + 1), "as no profile is"),
        ("[1, 2]", "holds no keys"),
        ("", "holds no keys"),
        ('{"format": 7}', "cost profile of format 7"),
    ],
)
def test_what_is_no_profile_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "bad"
    file.write_text(text)
    with pytest.raises(ProfileError, match=said) as caught:
        costs.read_profile(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("error", {"points": 9, "rms": float("nan"), "worst": 0.0, "left_out": None}),
        ("timings", [{"part": "foo", "batch": 1, "seconds": 1.0}]),
        ("bound", {"device": 5, "dtype": "", "target": ""}),
        ("parallel", ["a", 1, 1]),
        ("draft_provenance", "guessed"),
        ("shape", "star"),
        ("target", {"floor": 0.0}),
    ],
)
def test_a_saved_profile_that_was_tampered_with_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ProfileError):
        CostProfile.from_json(MEASURED.to_json() | {key: value})


def test_a_tree_priced_as_a_chain_says_so(path: str) -> None:
    tree = {"name": "incumbent", "path": "head:steps=5,topk=4,tokens=8"}
    found = costs.of(model(profile=path, drafts=[tree]), "incumbent")
    assert found is not None
    assert found.mismatches("", {}) == ("the draft makes a tree of steps=5,topk=4,tokens=8, and is priced as a chain",)
    assert found.origin()["priced_as"] == "chain"


def test_how_a_draft_without_a_path_proposes_is_not_known(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(MEASURED.to_json() | {"shape": "steps=5,topk=4,tokens=8"}))
    live = {"name": "incumbent", "path": None}
    given = model(profile=str(file), drafts=[live, TRAINED | {"name": "chain"}, LOOKUP])
    told = {}
    for name in ("incumbent", "chain", "lookup"):
        found = costs.of(given, name)
        assert found is not None
        told[name] = found.mismatches("", {})
    priced = "and is priced as a tree of steps=5,topk=4,tokens=8"
    assert told == {"incumbent": (), "chain": (f"the draft makes a chain, {priced}",), "lookup": ()}
