"""A test from its first request on: what it learns, when it watches, what changed terms keep, and restarts anywhere."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftwatch.drift.latch import Closed, Opened
from driftwatch.drift.monitors import Counts, length_counts, share_counts
from driftwatch.drift.watch import CUT, KINDS, SHARE_TOLERANCE, Kind, Terms, Watch

TERMS = Terms("off_share", 0.03, 1000.0, 100, 0.0)


def feed(watch: Watch, counts: list[Counts], first: int = 0) -> list[Opened | Closed]:
    found: list[Opened | Closed] = []
    for index, one in enumerate(counts, start=first):
        found += watch.observe(float(index), index, None, one)
    return found


def shares(seed: int, requests: int, share: float) -> list[Counts]:
    return [share_counts(x) for x in (np.random.default_rng(seed).random(requests) < share).tolist()]


def test_a_share_is_learnt_watched_and_latched() -> None:
    watch = Watch.start(TERMS)
    assert (watch.state, watch.evidence_ratio) == ("learning", 0.0)
    assert feed(watch, shares(1, 1500, 0.1)) == []
    assert watch.monitor is not None
    (opened,) = feed(watch, shares(2, 300, 0.5), first=1500)
    assert isinstance(opened, Opened)
    assert 1480 <= opened.start_index <= opened.index < 1560
    assert watch.monitor.latched
    (closed,) = feed(watch, shares(3, 400, 0.02), first=1800)
    assert isinstance(closed, Closed)
    assert watch.state == "watching"


def test_shares_have_a_wider_tolerance_than_rates() -> None:
    for kind in KINDS:
        baseline = Terms(kind, 0.03, 1000.0, 100, 0.0).baseline()
        if kind in ("below_break_even", "tail_worse"):
            assert baseline is None
            continue
        assert baseline is not None
        expected = SHARE_TOLERANCE if kind in ("off_share", "surprise", "slower") else 0.03
        assert baseline.tolerance == (0.015 if kind == "live_gap" else expected)


def test_break_even_is_watched_from_the_first_request() -> None:
    watch = Watch.start(Terms("below_break_even", 0.03, 1000.0, 500, 24.0, gamma=3, break_even=2.0))
    assert watch.state == "watching"
    (opened,) = feed(watch, [length_counts(20.0, 60.0, 3)] * 60)  # 1.33 tokens a window
    assert opened.index < 60
    healthy = Watch.start(watch.terms)
    assert feed(healthy, [length_counts(90.0, 60.0, 3)] * 500) == []


def test_surprise_is_cut_at_what_nine_in_ten_first_requests_stay_below() -> None:
    watch = Watch.start(Terms("surprise", 0.03, 1000.0, 100, 0.0))
    values = np.random.default_rng(5).normal(1.0, 0.2, 2000)
    counted = [watch.counts(float(value)) for value in values]
    assert counted[:100] == [(0.0, 0.0)] * 100, "no cut, no counts"
    assert watch.cut is not None
    assert watch.cut == pytest.approx(np.quantile(values[:100], CUT), abs=0.05)
    assert sum(part for part, _ in counted[100:]) == sum(values[100:] > watch.cut)
    assert watch.values == []
    with pytest.raises(ValueError, match="finite"):
        watch.counts(math.nan)


def test_changed_terms_keep_what_was_learnt_and_start_the_test_anew() -> None:
    watch = Watch.start(TERMS)
    feed(watch, shares(1, 1500, 0.1))
    feed(watch, shares(2, 100, 0.6), first=1500)
    assert watch.state == "drifting"
    again = Watch.start(replace(TERMS, tolerance=0.1), watch)
    assert (again.state, again.evidence_ratio) == ("watching", 0.0)
    assert again.baseline is not None
    assert watch.baseline is not None
    assert again.baseline.frozen == watch.baseline.frozen
    assert again.monitor is not None
    assert watch.monitor is not None
    assert again.monitor.limit == pytest.approx(watch.monitor.limit + 0.05)
    learning = Watch.start(TERMS)
    feed(learning, shares(1, 50, 0.1))
    assert Watch.start(replace(TERMS, threshold=5000.0), learning).state == "learning"


@given(
    st.sampled_from(["off_share", "surprise", "below_break_even", "live_gap"]),
    st.integers(0, 400),
    st.integers(0, 2**16),
)
@settings(max_examples=25, deadline=None)
def test_a_restart_anywhere_changes_nothing(kind: Kind, at: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    terms = Terms(kind, 0.3, 100.0, 20, 0.0, gamma=3, break_even=2.0)

    def one(watch: Watch, index: int, value: float) -> list[Opened | Closed]:
        whole = 1.0 if kind == "off_share" else 20.0
        counts = watch.counts(value) if kind == "surprise" else (round(value) if whole == 1.0 else value * whole, whole)
        session = f"s{index // 4}" if index % 3 else None
        return watch.observe(60.0 * index, index, session, counts)

    values = np.concatenate([rng.random(200) * 0.6 + 0.2, rng.random(200) * 0.3])
    straight, halves = Watch.start(terms), Watch.start(terms)
    told = [change for index, value in enumerate(values) for change in one(straight, index, float(value))]
    again: list[Opened | Closed] = []
    for index, value in enumerate(values):
        if index == at:
            halves = Watch.from_json(json.loads(json.dumps(halves.to_json())))
        again += one(halves, index, float(value))
    assert halves.to_json() == straight.to_json()
    assert again == told


def test_no_more_false_alarms_than_promised_over_all_tests_of_a_request() -> None:
    """Seven tests fed by the same requests, all at the edge of their nulls: each with seven times the threshold."""
    wanted, tests, requests, runs = 200.0, 7, 400, 60
    alarms = 0
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        watches = []
        for _ in range(tests):
            terms = Terms("below_break_even", 0.03, wanted * tests, 20, 0.0, gamma=1, break_even=1.5)
            watches.append(Watch.start(terms))
        for index in range(requests):
            common = rng.random() < 0.5  # the tests of one request are as dependent as can be, or not at all
            for k, watch in enumerate(watches):
                hit = common if k % 2 else rng.random() < 0.5
                changes = watch.observe(float(index), index, None, (64.0 * hit, 64.0))
                alarms += sum(isinstance(change, Opened) for change in changes)
    assert alarms <= runs * requests / wanted + 3.0 * math.sqrt(runs * requests / wanted)
    assert alarms > 0, "at the very edge some come: a test that cannot alarm proves nothing"


def test_a_tail_is_watched_from_the_first_request_and_is_no_matter_of_the_half_that_is_slower() -> None:
    terms = Terms("tail_worse", 0.03, 2000.0, 500, 24.0)
    watch = Watch.start(terms)
    assert watch.monitor is not None
    assert feed(watch, shares(1, 400, 0.005)) == []
    (opened,) = feed(watch, shares(2, 400, 0.1), 400)
    assert isinstance(opened, Opened)
    assert opened.estimate.upper is not None
    assert opened.estimate.upper < 0.5
    assert watch.state == "drifting"
    (closed,) = feed(watch, shares(3, 3000, 0.0), 800)
    assert isinstance(closed, Closed)
    assert closed.index > 1100, "half of a hundredth takes long to tell"
    most = Watch.start(terms)
    assert feed(most, shares(4, 400, 0.8)) == []
    assert most.state != "drifting"
    assert most.evidence_ratio > 1.0, "the p99 is slower, and so is the median"


def test_a_tail_at_its_limit_keeps_the_promise() -> None:
    wanted, requests, runs = 200.0, 1000, 40
    alarms = 0
    for seed in range(runs):
        watch = Watch.start(Terms("tail_worse", 0.03, wanted, 20, 0.0))
        alarms += sum(isinstance(one, Opened) for one in feed(watch, shares(seed, requests, 0.01)))
    assert alarms <= runs * requests / wanted


def test_learning_goes_on_under_other_terms_but_not_for_another_figure() -> None:
    watch = Watch.start(replace(TERMS, kind="slower", gamma=3, break_even=1.5, min_requests=5000))
    feed(watch, shares(5, 200, 0.1))
    assert watch.baseline is not None
    more = Watch.start(replace(watch.terms, tolerance=0.1, threshold=2000.0), watch)
    assert more.baseline is not None
    assert (more.baseline.moments, more.baseline.tolerance) == (watch.baseline.moments, 0.1)
    for other in (replace(watch.terms, break_even=1.8), replace(watch.terms, gamma=5)):
        anew = Watch.start(other, watch)
        assert anew.baseline is not None
        assert anew.baseline.moments.units == 0, "what is slower is counted otherwise from here on"
