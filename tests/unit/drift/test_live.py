"""Engine figures as counts: the words of the acceptance definitions out of what engines say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driftwatch.drift.live import METRICS, LiveCounts, Refused, counts, restated, settle
from driftwatch.drift.sums import Sums

TRACES = Path(__file__).parents[2] / "data" / "traces"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TRACES / f"{name}.jsonl").read_text().splitlines()]


def one(**figures: Any) -> LiveCounts:
    found = counts(figures, 5)
    assert found is not None
    return found


def test_a_window_that_accepted_fewer_than_it_proposed_has_one_rejection() -> None:
    found = one(windows=4, drafted=12, accepted=6, accepted_histogram=[1, 1, 1, 1], output_tokens=11)
    assert (found.metric, found.gamma, found.rejected) == ("hit_rate", 3, 3)
    assert found.accepted_at == (3, 2, 1)
    assert found.trials("hit_rate", 3) == (6, 9)
    tally = found.tally(3, "hit_rate")
    assert (tally.steps[2], tally.tokens, tally.accepted[2], tally.tested[2]) == (4, 10, 6, 9)


def test_per_window_lists_say_what_a_histogram_cannot() -> None:
    """An n-gram draft that ran out after one proposal, all of it accepted, has no rejection there."""
    lists = {"accepted_per_window": [3, 1, 0], "drafted_per_window": [3, 1, 3]}
    found = one(accepted_histogram=[1, 1, 0, 1], windows=3, drafted=7, accepted=4, **lists, output_tokens=10)
    assert (found.rejected, found.metric, found.gamma) == (1, "hit_rate", 3)
    assert found.tally(3, "hit_rate").steps[2] == 5, "nine tokens, seven of three windows: two plain steps"
    without = one(accepted_histogram=[1, 1, 0, 1], windows=3, drafted=7, accepted=4)
    assert (without.rejected, without.metric) == (None, "acceptance_rate")


def test_totals_alone_give_the_rate_or_the_length() -> None:
    rate = one(windows=10, drafted=40, accepted=12)
    assert (rate.metric, rate.gamma, rate.trials("acceptance_rate", 4)) == ("acceptance_rate", 4, (12, 40))
    length = one(windows=10, accepted=12)
    assert (length.metric, length.gamma, length.trials("acceptance_length", 5)) == ("acceptance_length", 5, (12, 50))
    with pytest.raises(ValueError, match="do not give hit_rate"):
        length.trials("hit_rate", 5)
    assert one(windows=10, accepted=12, accepted_histogram=[4, 2, 2, 2]).gamma == 3
    assert one(windows=2, accepted=14).gamma == 7, "more than were configured"


@pytest.mark.parametrize("figures", [{}, {"windows": 3}, {"drafted": 9, "accepted": 3}])
def test_what_says_nothing_is_unknown_not_zero(figures: dict[str, Any]) -> None:
    assert counts(figures, 5) is None


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ({"windows": 2, "drafted": 4, "accepted": 5}, "contradictory"),
        ({"windows": 2, "accepted": 3, "accepted_histogram": [0, 1, 0]}, "contradictory"),
        ({"accepted_per_window": [2], "drafted_per_window": [1]}, "contradictory"),
        ({"accepted_per_window": [1], "drafted_per_window": [1, 1]}, "contradictory"),
        ({"windows": 1, "accepted": 1, "gamma": 4000}, "gamma_too_large"),
        ({"accepted_per_window": [10**12]}, "gamma_too_large"),
        ({"accepted_histogram": [1] * 200}, "gamma_too_large"),
        ({"windows": 10**12, "accepted": 3}, "implausible"),
        ({"windows": 3, "accepted": 3, "output_tokens": 10**12}, "implausible"),
        ({"windows": 0, "accepted": 3}, "contradictory"),
        ({"windows": 1, "accepted": 1, "refused": "adaptive_steps"}, "adaptive_steps"),
    ],
)
def test_refusals(figures: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused) as refused:
        counts(figures, 5)
    assert refused.value.reason == reason


@pytest.mark.parametrize("name", ["draft3.T0", "draft5.T0.8", "eagle3.T0.8", "ngram3.T0"])
def test_recorded_engine_figures_add_up_and_their_tokens_fit(name: str) -> None:
    """Windows of vLLM 0.32: whole, they give the served tokens; the last may run past the end."""
    for row in rows(name):
        figures = row["engine"] | {"output_tokens": len(row["output_token_ids"])}
        found = one(**figures)
        assert (found.windows, found.drafted, found.accepted) == tuple(
            row["engine"][key] for key in ("windows", "drafted", "accepted")
        )
        assert found.metric == "hit_rate"
        lists = zip(figures["accepted_per_window"], figures["drafted_per_window"], strict=True)
        assert found.rejected == sum(a < d for a, d in lists)
        assert sum(found.accepted_at) == found.accepted
        if not name.startswith("ngram"):
            assert 0 <= found.windows + found.accepted - found.tokens <= found.gamma + 1
            assert found.tally(found.gamma, "hit_rate").steps[-1] == found.windows


def test_restated_sums_keep_their_counts_in_the_new_last_column() -> None:
    found = one(windows=4, drafted=12, accepted=6, accepted_histogram=[1, 1, 1, 1])
    sums = Sums.request(found.tally(3, "hit_rate"), 2.0)
    wider = restated(sums, 5)
    assert wider.gammas == 5
    assert restated(wider, 3) is wider
    assert wider.tally.figures(5) == {**sums.tally.figures(3), "accepted_per_depth": [3, 2, 1, 0, 0]}
    assert np.array_equal(wider.products[:, 4], sums.products[:, 2])
    both = wider + Sums.request(found.tally(5, "hit_rate"))
    assert both.interval("hit_rate", 5).value == pytest.approx(6 / 9)


def test_a_request_without_a_window_stands_in_the_way_of_no_metric() -> None:
    found = one(windows=0, drafted=0, accepted=0, output_tokens=1)
    assert (found.metric, found.trials("hit_rate", 3)) == ("hit_rate", (0, 0))
    assert found.tally(3, "hit_rate").steps[-1] == 0


def test_a_few_requests_that_say_less_are_left_out_and_many_decide() -> None:
    fine, rate, length = METRICS
    assert settle(fine, [fine] * 20, 0, 0) == (fine, 0)
    assert settle(fine, [rate], 19, 0) == (fine, 1)
    assert settle(fine, [rate], 18, 0) == (rate, 0)
    assert settle(fine, [rate], 0, 0) == (rate, 0)
    assert settle(fine, [fine] * 10 + [rate] * 5 + [length], 30, 0) == (rate, 1)
    assert settle(fine, [rate], 38, 1) == (fine, 2)
    assert settle(fine, [rate], 36, 1) == (rate, 0)
    assert settle(rate, [fine] * 5, 3, 0) == (rate, 0)
    assert settle(length, [length], 0, 0) == (length, 0)
