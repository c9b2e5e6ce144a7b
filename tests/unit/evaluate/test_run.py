"""From files to report: which models run where, and whose costs are used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from driftwatch.control.costs import read_profile
from driftwatch.errors import DriftwatchError
from driftwatch.evaluate.baseline import Conditions
from driftwatch.evaluate.engine import Limits
from driftwatch.evaluate.report import Report
from driftwatch.evaluate.run import Subject, run
from driftwatch.settings import HiddenStates, Shadow
from driftwatch.shadow.profile.bound import shape_of
from driftwatch.shadow.target import Target
from tests.unit.shadow.conftest import CPU, DATA
from tests.unit.shadow.state_engines import SmallSglang

MODELS = DATA / "models"
TARGET, EAGLE3 = MODELS / "target", MODELS / "eagle3"
TREE = f"{EAGLE3}:steps=5,topk=4,tokens=8"
ROW = "{batch: 1, step_ms: 20, c: 0.1, v: {1: 1.0, 7: 1.2, 8: 1.2}}"


@pytest.fixture
def records(tmp_path: Path) -> Path:
    path = tmp_path / "records.jsonl"
    path.write_text("".join((DATA / "traces" / "eagle3.T0.jsonl").read_text().splitlines(keepends=True)[:6]))
    return path


def evaluated(records: Path, draft: str | None, costs: str | None = None, **more: Any) -> Report:
    profile = None
    if costs is not None:
        path = records.with_name("costs.yaml")
        path.write_text(costs)
        profile = read_profile(path)
    shadow = more.pop("shadow", Shadow(device="cpu"))
    subject = Subject([records], (), draft, TARGET, profile, **more)
    return run(subject, Conditions(5), Limits(10, 1), shadow, lambda *_: None)


def test_an_engine_runs_the_target(records: Path) -> None:
    """The head is judged as on a target of one's own; lookahead decoding, which needs the model itself, is left out."""
    here = evaluated(records, str(EAGLE3)).segments[0].candidates
    engine = SmallSglang(Target(TARGET, device=CPU, dtype=torch.float32), (2, 4, 5))
    with engine.running() as url:
        there = (
            evaluated(records, str(EAGLE3), hidden_states=HiddenStates(url=url, layers=[2, 4, 5]))
            .segments[0]
            .candidates
        )
    assert len(engine.asked) >= 6
    assert [one.draft.kind for one in here] == ["trained", "ngram", "lookahead"]
    assert [one.draft.kind for one in there] == ["trained", "ngram"]
    for gamma, figures in here[0].figures.items():
        mine, theirs = figures["hit_rate"], there[0].figures[gamma]["hit_rate"]
        assert mine.numerator == pytest.approx(theirs.numerator, abs=3)


def test_the_target_is_spread_as_the_settings_say(records: Path) -> None:
    with pytest.raises(DriftwatchError, match="nowhere"):
        evaluated(records, str(EAGLE3), shadow=Shadow(device="cpu", device_map="nowhere"))


@pytest.mark.parametrize(
    ("draft", "shape", "gamma", "window"),
    [
        (TREE, "steps=5,topk=4,tokens=8", 5, 5 * 0.1 + 1.2),
        (str(MODELS / "dflash"), "block", 7, 0.1 + 1.2),
        (str(EAGLE3), "chain", 7, 7 * 0.1 + 1.2),
    ],
)
def test_a_draft_is_priced_by_its_own_shape_or_not_at_all(
    records: Path, draft: str, shape: str, gamma: int, window: float
) -> None:
    priced = evaluated(records, draft, f"shape: '{shape}'\nbatches: [{ROW}]").segments[0]
    values = {value.gamma: value for value in priced.candidates[0].values}
    assert values[gamma].break_even == pytest.approx(window, rel=0.05)
    other = "block" if shape == "chain" else "chain"
    found = evaluated(records, draft, f"shape: {other}\nbatches: [{ROW}]")
    one = found.segments[0]
    assert one.candidates[0].values == ()
    assert one.candidates[0].figures
    assert one.verdict.decision == "not_enough_data"
    assert "acceptance alone" in found.notes[0]
    assert shape_of(draft).described in found.notes[0]
    assert one.candidates[1].values, "what needs no training has its costs all the same"
    json.dumps(found.to_json(), allow_nan=False)


def test_a_tree_deeper_than_the_usual_lengths_has_figures(records: Path) -> None:
    tree = f"{EAGLE3}:steps=10,topk=2,tokens=12"
    found = evaluated(records, tree, f"shape: 'steps=10,topk=2,tokens=12'\nbatches: [{ROW}]")
    trained = found.segments[0].candidates[0]
    assert [*trained.figures] == [10]
    assert (trained.figures[10]["acceptance_length"].value or 0.0) > 1.0
    assert [value.gamma for value in trained.values] == [10]


def test_costs_without_a_draft_are_refused_before_anything_is_replayed(records: Path) -> None:
    bare = "batches: [{batch: 1, step_ms: 20, v: {4: 1.1}}]"
    with pytest.raises(DriftwatchError, match="the cost profile has no draft; measure it with"):
        evaluated(records, str(EAGLE3), bare)
    assert evaluated(records, None, bare).segments[0].candidates[0].values, "prompt lookup needs no costs of its own"
