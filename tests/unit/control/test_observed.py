"""What one request says to each test: by hand, and from what a real engine reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driftwatch.acceptance import Weights, tally
from driftwatch.control.observed import of_engine, of_replay
from driftwatch.control.terms import Seen
from driftwatch.drift.live import counts
from driftwatch.drift.monitors import Counts
from driftwatch.drift.sums import Sums
from driftwatch.drift.watch import KINDS, Kind
from driftwatch.settings import Model
from driftwatch.store.replays import Judged

TRACES = Path(__file__).parents[2] / "data" / "traces"
MODEL = Model(gamma=3, break_even=2.0)


def judged(bits: str, **fields: Any) -> Judged:
    weights = Weights(np.array([[float(bit)] for bit in bits]))
    known: dict[str, Any] = {
        "replay_id": 1,
        "request_id": "r",
        "deployment_id": 1,
        "model": "m",
        "segment": "all",
        "split": "none",
        "draft": "incumbent",
        "fingerprint": "f",
        "served_at": 0.0,
        "session": None,
        "weight": 1.0,
        "weights": weights,
    }
    return Judged(**known | fields)


def seen(one: Judged) -> Seen:
    found = tally(one.weights)
    return Seen(1, 0.0, None, Sums.request(found), float(found.accepted[2]), float(found.tested[2]))


def observed(one: Judged) -> dict[Kind, Counts]:
    return dict(of_replay(one, seen(one), MODEL, KINDS).counts)


def test_a_replay_alone() -> None:
    """The worked example of the acceptance definitions, at gamma 3: windows accept 2, 3, 0 of w = 1 1 0 1 1 1 1 0."""
    found = observed(judged("11011110"))
    assert found["below_break_even"] == (5.0, 9.0)
    assert found["hit_rate_above"] == (5.0, 7.0)
    assert not {"off_share", "live_gap", "agreement", "slower"} & found.keys(), "no sketch, no engine, too short"


@pytest.mark.parametrize(("split", "expected"), [("off", (1.0, 1.0)), ("on", (0.0, 1.0)), ("none", None)])
def test_a_split_is_one_trial(split: str, expected: tuple[float, float] | None) -> None:
    assert observed(judged("1101", split=split)).get("off_share") == expected


@pytest.mark.parametrize(("bits", "slower"), [("0" * 40, 1.0), ("1" * 40, 0.0)])
def test_slower_compares_the_cost_of_its_windows_with_plain_decoding(bits: str, slower: float) -> None:
    assert observed(judged(bits))["slower"] == (slower, 1.0)


def test_an_engine_that_does_what_the_replay_says_agrees_with_it() -> None:
    engine = {"accepted_per_window": [2, 3, 0], "drafted_per_window": [3, 3, 3]}
    found = observed(judged("11011110", engine=engine))
    assert found["agreement"] == (2.0, 2.0), "the last window is left out"
    part, whole = found["live_gap"]
    assert (part, whole) == (3.5, 7.0), "a gap of 0 is a half"
    worse = observed(judged("11011110", engine=engine | {"accepted_per_window": [1, 0, 0]}))
    assert worse["agreement"] == (0.0, 2.0)
    assert worse["live_gap"][0] / worse["live_gap"][1] < 0.5


def test_figures_that_do_not_tell_windows_apart_are_compared_by_rate_or_not_at_all() -> None:
    histogram = {"windows": 3, "drafted": 9, "accepted": 5, "accepted_histogram": [1, 0, 1, 1]}
    assert observed(judged("11011110", engine=histogram)).keys() >= {"live_gap"}
    assert "agreement" not in observed(judged("11011110", engine=histogram))
    for engine in ({"windows": 3, "drafted": 9, "accepted": 5}, {"refused": "adaptive_steps"}, {"windows": 1}, {}):
        assert "live_gap" not in observed(judged("11011110", engine=engine))


def test_what_the_rejection_rule_expects_has_no_windows_of_its_own() -> None:
    engine = {"accepted_per_window": [2, 3, 0], "drafted_per_window": [3, 3, 3]}
    found = observed(judged("11011110", engine=engine, rule="rejection"))
    assert "live_gap" in found
    assert "agreement" not in found


def test_surprise_is_what_is_left_of_the_log_probability_beside_the_entropy() -> None:
    figures = {"compared": 4, "logprob": -10.0, "entropy": 6.0, "p": 0.3}
    one = judged("1101", figures=figures)
    assert of_replay(one, seen(one), MODEL, KINDS).surprise == pytest.approx(1.0)
    assert of_replay(one, seen(one), MODEL, ["slower"]).surprise is None
    for nothing in (None, {}, {"p": 0.3}):
        one = judged("1101", figures=nothing)
        assert of_replay(one, seen(one), MODEL, KINDS).surprise is None


def test_a_real_engines_figures_alone() -> None:
    row = json.loads((TRACES / "draft3.T0.jsonl").read_text().splitlines()[0])
    live = counts(row["engine"] | {"output_tokens": len(row["output_token_ids"])}, 3)
    assert live is not None
    mine = Seen(1, 0.0, None, Sums.request(live.tally(3, "hit_rate")), *live.trials("hit_rate", 3))
    found = of_engine(mine, live, MODEL, KINDS).counts
    windows = row["engine"]["windows"]
    assert found["below_break_even"] == (row["engine"]["accepted"], 3 * windows)
    assert found["slower"] == (float(windows * 2.0 > len(row["output_token_ids"]) - 1), 1.0)
    assert found["hit_rate_above"] == live.trials("hit_rate", 3)
    assert "off_share" not in found
