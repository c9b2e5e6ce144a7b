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


def test_requests_made_from_text_stand_apart(rng: np.random.Generator) -> None:
    exact = judged(rng, 0.8, 40, "tenant=a")
    text = [replace(one, retokenised=True) for one in judged(rng, 0.0, 40, "tenant=a")]
    mixed = report([*exact, *text], drafts(), costs(), Conditions(3))
    alone = report(exact, drafts(), costs(), Conditions(3))
    assert [one.name for one in mixed.segments] == ["all", "tenant=a", "retokenised"]
    assert mixed.segments[0].to_json() == alone.segments[0].to_json()
    assert mixed.segments[2].verdict.decision == "do_not_use"
    assert [one.name for one in report(text, drafts(), costs(), Conditions(3)).segments] == ["all", "tenant=a"]


def test_what_was_measured_is_the_engines_own(rng: np.random.Generator) -> None:
    """Without a trained draft nobody knows what an engine drafts with: it is not the prompt lookup judged beside it."""
    clocks = {"plain": Clock(0.1, 1.0, 100), "speculative": Clock(0.1, 0.5, 100)}
    requests = [replace(one, **clocks) for one in judged(rng, 0.3, 30, draft="ngram")]  # type: ignore[arg-type]
    (one,) = report(requests, [Draft("ngram", "ngram", costs(0.0))], costs(), Conditions(3)).segments
    assert one.about == "the engine's own speculation"
    assert one.to_json()["verdict"]["about"] == one.about
    assert "the engine's own speculation, gamma 3" in sections(one)[2].sentences[0]
    assert one.verdict.flip is None


def test_costs_of_measured_times_are_those_of_section_one(rng: np.random.Generator) -> None:
    """1 s for 100 tokens against .5 s, two at once, at 3.6 an hour: 5 and 2.5 per million. The profile would say 10."""
    requests = [
        replace(one, plain=Clock(0.1, 1.0, 100), speculative=Clock(0.1, 0.5 + 0.001 * (i % 3 - 1), 100))
        for i, one in enumerate(judged(rng, 0.8, 30))
    ]
    (one,) = report(requests, drafts(), costs(), Conditions(3, batch=2.0, per_gpu_hour=3.6)).segments
    assert one.price is not None
    assert one.baseline.per_million == one.price.plain == pytest.approx(5.0)
    assert one.price.speculative.value == pytest.approx(2.5)
    assert one.to_json()["cost"]["speculative"] == pytest.approx([2.5, 2.5, 2.5], abs=0.01)
    assert one.price.saved.value == pytest.approx(0.5)
    told = sections(one)[3]
    assert "measured on real engines" in told.sentences[0]
    assert told.tables[0].rows[0][1] == "5.00"
    assert len(told.tables[0].rows) == 2
    assert one.about == "the engine's own speculation"


def test_what_is_predicted_is_of_what_was_judged(rng: np.random.Generator) -> None:
    (predicted,) = report(
        judged(rng, 0.3, 30, draft="ngram"), [Draft("ngram", "ngram", costs())], costs(), Conditions(3)
    ).segments
    assert predicted.about == "ngram"


def test_at_a_rate_break_even_is_at_the_batch_of_plain_decoding(rng: np.random.Generator) -> None:
    """By hand: a step takes 20 ms and .5 ms a sequence. At 10 requests a second of 100 tokens plain decoding settles at
    B = 10 * 100 * (.02 + .0005 (1 + B)), B = 41, and a request sees 42. gamma 1 at c = .1 then costs
    .1 * .041 + .02 + .0005 * 84 = 66.1 ms, 1.612 plain steps of 41 ms."""
    profile = costs(0.1, slope=0.0005)
    (one,) = report(judged(rng, 0.9, 60), [Draft("d", "trained", profile)], profile, Conditions(3, rate=10.0)).segments
    value = one.candidates[0].values[0]
    assert one.baseline.batch == pytest.approx(42.0)
    assert value.break_even == pytest.approx((0.1 * 0.041 + 0.062) / 0.041)
    assert one.room is not None
    assert one.room.needs[0].break_even == pytest.approx(value.break_even)
    for found in one.candidates[0].values:
        assert found.length.value is not None
        assert (found.judged.value or 0.0) > 1.0 if found.length.value > found.break_even else found.judged.value < 1.0  # type: ignore[operator]


def test_costs_of_another_shape_are_none_of_the_drafts(rng: np.random.Generator) -> None:
    (one,) = report(judged(rng, 0.8, 30), [Draft("d", "trained", None)], costs(), Conditions(3)).segments
    assert one.verdict.decision == "not_enough_data"
    assert one.verdict.reasons == ("the costs given are none of d",)
