"""The report: which verdict, of what, and what is said beside it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from driftwatch.evaluate.baseline import Conditions
from driftwatch.evaluate.candidate import Draft
from driftwatch.evaluate.report import report
from driftwatch.evaluate.request import Clock, Request
from driftwatch.evaluate.tables import sections

from .conftest import costs, hits, judged


def both(rng: np.random.Generator, trained: float, ngram: float, count: int = 60) -> list[Request]:
    return [replace(one, tallies={**one.tallies, "ngram": hits(rng, ngram)}) for one in judged(rng, trained, count)]


def drafts(c: float = 0.1) -> list[Draft]:
    return [Draft("d", "trained", costs(c)), Draft("ngram", "ngram", costs(c).with_draft(0.0))]


def test_each_segment_has_its_own_verdict(rng: np.random.Generator) -> None:
    requests = [*judged(rng, 0.8, 60, "tenant=a"), *judged(rng, 0.02, 60, "tenant=b"), *judged(rng, 0.8, 1, "tenant=c")]
    found = report(requests, drafts(), costs(), Conditions(3, per_gpu_hour=2.0))
    decisions = {one.name: one.verdict.decision for one in found.segments}
    assert list(decisions) == ["all", "tenant=a", "tenant=b", "tenant=c"]
    assert decisions["tenant=a"] in ("use", "use_with_gamma")
    assert (decisions["tenant=b"], decisions["tenant=c"]) == ("do_not_use", "not_enough_data")
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert [one["segment"] for one in told["segments"]] == list(decisions)
    assert told["segments"][2]["acceptance"][0]["stop"].startswith("acceptance is too low")
    assert "above" in found.segments[2].would_change[0]
    assert any("STOP, d" in flag for flag in sections(found.segments[2])[1].flags)


def test_an_ngram_draft_that_does_as_well_is_named(rng: np.random.Generator) -> None:
    (same,) = report(both(rng, 0.6, 0.6), drafts(), costs(), Conditions(3)).segments
    assert same.untrained is not None
    assert "as well without a trained draft" in same.untrained
    (better,) = report(both(rng, 0.9, 0.2), drafts(), costs(), Conditions(3)).segments
    assert better.untrained is None
    # Neither pays: then nobody does well.
    (none,) = report(both(rng, 0.0, 0.0), drafts(), costs(), Conditions(3)).segments
    assert none.untrained is None


def test_without_a_draft_the_room_is_what_is_said(rng: np.random.Generator) -> None:
    (one,) = report(judged(rng, 0.5, 9, draft="none"), [], costs(), Conditions(3)).segments
    assert one.verdict.decision == "not_enough_data"
    assert one.room is not None
    assert one.room.easiest is not None
    assert one.would_change == (f"a draft with a hit rate above {one.room.easiest.hit_rate:.2f} at gamma 1",)
    assert "what a draft would need" in sections(one)[0].tables[-1].caption


def test_where_no_draft_can_pay(rng: np.random.Generator) -> None:
    dear = costs(c=3.0)
    (one,) = report(judged(rng, 0.5, 9, draft="none"), [], dear, Conditions(3)).segments
    assert one.verdict.decision == "do_not_use"
    assert "not even a draft whose every proposal is accepted" in one.verdict.reasons[0]


def test_without_costs_acceptance_is_shown_and_no_verdict_is_made(rng: np.random.Generator) -> None:
    (one,) = report(judged(rng, 0.5, 9), [Draft("d", "trained", None)], None, Conditions(3)).segments
    assert one.verdict.decision == "not_enough_data"
    assert "give --profile" in one.verdict.reasons[0]
    assert one.candidates[0].figures


@pytest.mark.parametrize(("ratio", "decision"), [(0.5, "use"), (2.0, "do_not_use")])
def test_measured_times_overrule_predicted_ones(rng: np.random.Generator, ratio: float, decision: str) -> None:
    """The replay promises a gain either way; the clocks decide."""
    requests = [
        replace(
            one,
            plain=Clock(0.1, 1.0 + 0.1 * rng.random(), 100),
            speculative=Clock(0.1, ratio * (1.0 + 0.1 * rng.random()), 100),
        )
        for one in judged(rng, 0.8, 30)
    ]
    (one,) = report(requests, drafts(), costs(), Conditions(3)).segments
    assert one.verdict.decision == decision
    assert "measured speedup" in one.verdict.reasons[0]
    assert one.wall is not None
    assert one.wall.source == "measured"
