"""What a replay of files adds up to: sessions are units, what was made from text stands apart, nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driftwatch.acceptance import Weights, tally
from driftwatch.drift.sums import Sums
from driftwatch.records import Record
from driftwatch.shadow.chain import ChainDraft
from driftwatch.shadow.history import Outcome, Summary, per_request, replay_records
from driftwatch.shadow.ngram import parse
from driftwatch.shadow.tokenizer import Retokeniser

from .conftest import CPU, DATA, trace

DRAFT = parse("ngram:min=1,max=3")
CHAIN = DATA / "models" / "chain"


def outcome(hits: list[int], *, retokenised: bool = False, **fields: Any) -> Outcome:
    record = Record(id="r", prompt_token_ids=[1], output_token_ids=[1], **fields)
    return Outcome(record, Weights(np.array(hits, np.float64)[:, None]), None, retokenised=retokenised)


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    found = Summary("argmax", 2, ["tenant"])
    for one in outcomes:
        found.add(one)
    return found.as_dict(DRAFT)


def test_turns_of_a_session_are_one_unit_of_the_interval() -> None:
    """Ten copies of a turn tell no more than one: counts grow, the interval does not shrink."""
    easy, hard = [1, 1, 1, 0], [0, 0, 1, 0]
    turns = [outcome(hits, session=name) for hits, name in ((easy, "a"), (hard, "b"), (easy, "c")) for _ in range(10)]
    once = [outcome(hits, session=name) for hits, name in ((easy, "a"), (hard, "b"), (easy, "c"))]
    alone = [outcome(hits) for hits in (easy, hard, easy) for _ in range(10)]
    many, few, apart = (summary(some)["gamma"]["2"] for some in (turns, once, alone))
    assert (many["windows"], many["hit_rate"]) == (10 * few["windows"], pytest.approx(few["hit_rate"]))
    for limit in ("hit_rate_lower", "hit_rate_upper", "steps_per_token_lower", "steps_per_token_upper"):
        assert many[limit] == pytest.approx(few[limit])
    assert apart["hit_rate_upper"] - apart["hit_rate_lower"] < many["hit_rate_upper"] - many["hit_rate_lower"]


def test_without_sessions_each_request_is_a_unit() -> None:
    some = [outcome([1, 0, 1], labels={"tenant": "a"}), outcome([0, 0, 1, 1]), outcome([1, 1], labels={"tenant": "b"})]
    report = summary(some)
    sums = sum((Sums.request(tally(one.weights, 2)) for one in some if one.weights is not None), Sums.zero(2))
    assert report["gamma"]["2"]["hit_rate_lower"] == sums.interval("hit_rate", 2).lower
    assert (report["requests"], report["output_tokens"], list(report["gamma"])) == (3, 12, ["1", "2"])
    by = report["by"]["tenant"]
    assert {value: (part["requests"], part["output_tokens"]) for value, part in by.items()} == {
        "a": (1, 4),
        "b": (1, 3),
        "none": (1, 5),
    }
    assert "retokenised" not in report


def test_what_was_made_from_text_is_never_pooled() -> None:
    exact, text = outcome([1, 1, 1]), outcome([0, 0, 0, 0], retokenised=True, labels={"tenant": "a"})
    report = summary([exact, text, text])
    assert report | {"retokenised": None, "skipped": None} == summary([exact]) | {"retokenised": None, "skipped": None}
    apart = report["retokenised"]
    assert (apart["requests"], apart["gamma"]["1"]["hit_rate"], list(apart["by"]["tenant"])) == (2, 0.0, ["a"])
    only = summary([text, text])
    assert only["requests"] == only["retokenised"]["requests"] == 2
    assert only["gamma"] == only["retokenised"]["gamma"] == apart["gamma"]
    assert per_request(text, "argmax", 2)["retokenised"] is True
    assert "retokenised" not in per_request(exact, "argmax", 2)


def test_every_record_has_an_outcome_and_text_is_marked(tmp_path: Path) -> None:
    """Of real records: requests and skipped add up to the lines, and each line's counts to the report's."""
    ids = trace("draft3.T0")[:3]
    records = [
        *ids,
        Record(id="text", prompt="def f(x):", output="    return x + 1\n    return x"),
        Record(id="short", prompt_token_ids=[1, 2], output_token_ids=[3]),
        Record(id="far", prompt_token_ids=[1, 2], output_token_ids=[3, 4_000]),
        Record(id="empty", prompt="", output="x"),
    ]
    draft = ChainDraft.load(CHAIN, device=CPU, dtype=torch.float32)
    found = list(replay_records(draft, records, batch_tokens=4096, tokenizer=Retokeniser(CHAIN)))
    assert [one.record.id for one in found] == [record.id for record in records]
    assert [one.record.id for one in found if one.weights is not None and one.retokenised] == ["text"]
    whole = Summary("argmax", 3)
    for one in found:
        whole.add(one)
    report = whole.as_dict(draft)
    assert report["requests"] + report["retokenised"]["requests"] + sum(report["skipped"].values()) == len(records)
    lines = [per_request(one, "argmax", 3) for one in found if one.weights is not None and not one.retokenised]
    for gamma, figures in report["gamma"].items():
        for name in ("steps", "windows", "drafted", "accepted", "rejected"):
            assert figures[name] == sum(line["gamma"][gamma][name] for line in lines)
