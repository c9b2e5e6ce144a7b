"""Lookahead decoding on a share of recorded requests: which ones, in which words, and through the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.acceptance import accepted_per_window, tally
from driftwatch.cli.replay import replay as command
from driftwatch.records import Record
from driftwatch.shadow.lookahead.decoding import LookaheadResult, run
from driftwatch.shadow.lookahead.method import Lookahead, parse
from driftwatch.shadow.lookahead.share import Tried, choose, decode_records, weights_of
from driftwatch.shadow.target import Target

from .conftest import DATA, trace

TARGET = DATA / "models" / "target"
METHOD = Lookahead(window=5, ngram=3, guesses=5, requests=4)


def record(id: str, prompt: Sequence[int] = (1, 2), output: Sequence[int] = (3, 4, 5), **more: Any) -> Record:
    return Record(id=id, prompt_token_ids=list(prompt), output_token_ids=list(output), **more)


@given(st.sets(st.text(min_size=1, max_size=6), max_size=20), st.integers(1, 25), st.randoms())
def test_the_share_depends_on_ids_alone(ids: set[str], limit: int, order: Any) -> None:
    records = [record(id) for id in sorted(ids) if "\x00" not in id and id.isprintable()]
    chosen, seen = choose(records, limit)
    assert seen == len(records)
    assert len(chosen) == min(limit, seen)
    assert [one for one in records if one in chosen] == chosen
    order.shuffle(records)
    again, _ = choose(records, limit)
    assert {one.id for one in again} == {one.id for one in chosen}
    fewer, _ = choose(records, max(1, limit - 1))
    assert {one.id for one in fewer} <= {one.id for one in chosen}


@st.composite
def walks(draw: st.DrawFn) -> tuple[LookaheadResult, Lookahead]:
    """A run that could have been, its last step perhaps cut by the output's end."""
    ngram = draw(st.integers(2, 5))
    guesses = draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    accepted = [draw(st.integers(0, ngram - 1)) if tried else 0 for tried in guesses]
    cut = draw(st.booleans()) and accepted[-1] > 0
    tokens = sum(accepted) + len(accepted) - cut
    return LookaheadResult([0] * (tokens + 1), accepted, [1] * len(accepted), guesses), Lookahead(5, ngram, 5)


@given(walks())
def test_a_run_becomes_the_weights_of_its_own_walk(case: tuple[LookaheadResult, Lookahead]) -> None:
    result, method = case
    weights = weights_of(result, method)
    counts = tally(weights, method.gamma)
    last = method.gamma - 1
    tried = [accepted for accepted, n in zip(result.accepted_per_step, result.guesses_per_step, strict=True) if n]
    assert weights.tokens == len(result.output) - 1
    assert counts.steps[last] == result.steps
    assert counts.windows[last] == len(tried)
    assert counts.drafted[last] == method.gamma * len(tried)
    assert counts.accepted[last] == result.accepted
    assert accepted_per_window(weights, method.gamma) == tried
    missed = [one for one in tried if one < method.gamma]
    ends_in_a_cut = sum(result.accepted_per_step) + result.steps > weights.tokens
    assert counts.rejected[last] == len(missed) - (ends_in_a_cut and result.accepted_per_step[-1] < method.gamma)


def test_records_are_decoded_greedily_as_far_as_they_were_served(target: Target) -> None:
    hot = [one for one in trace("eagle3.T0.8") if one.temperature][:3]
    found = list(decode_records(target, hot, METHOD))
    for one, outcome in zip(hot, found, strict=True):
        prompt, output = one.prompt_token_ids or [], one.output_token_ids or []
        (alone,) = run(target.model().model, [prompt], METHOD, max_tokens=len(output))
        assert outcome.record is one
        assert outcome.fed == alone.fed
        assert outcome.weights is not None
        assert outcome.weights.tokens == len(alone.output) - 1 <= len(output) - 1
        assert accepted_per_window(outcome.weights, METHOD.gamma) == [
            accepted for accepted, n in zip(alone.accepted_per_step, alone.guesses_per_step, strict=True) if n
        ]


def test_what_cannot_be_decoded_is_counted(target: Target) -> None:
    records = [
        record("short", output=[3]),
        record("long", prompt=[1] * 1000, output=[1] * 25),
        record("other vocabulary", prompt=[2048]),
        Record(id="text", prompt="a", output="b"),
        record("good"),
    ]
    tried = Tried.on(records, Lookahead(5, 3, 5), by=["tenant"])
    for outcome in decode_records(target, tried.records, METHOD):
        tried.add(outcome)
    report = tried.as_dict(METHOD)
    assert report["requests"] == 1
    assert report["skipped"] == {"too_short": 1, "too_long": 1, "outside_vocabulary": 1, "no_tokenizer": 1}
    assert report["run"]["records"] == report["run"]["chosen"] == 5


def invoke(*arguments: str, exit_code: int = 0) -> str:
    done = CliRunner().invoke(command, list(arguments))
    assert done.exit_code == exit_code, done.output
    return done.output


FILE = str(DATA / "traces" / "ngram3.T0.jsonl")
SPEC = "lookahead:window=5,ngram=3,guesses=5,requests=4"


def test_replay_command_runs_the_target_on_a_share(target: Target, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    options = (FILE, "--draft", SPEC, "--target", str(TARGET), "--by", "domain", "--per-request", str(lines))
    report = json.loads(invoke(*options, "--json"))
    chosen, _ = choose(trace("ngram3.T0"), 4)
    results = [
        run(target.model().model, [one.prompt_token_ids or []], METHOD, max_tokens=len(one.output_token_ids or []))[0]
        for one in chosen
    ]
    steps, tokens = sum(one.steps for one in results), sum(len(one.output) - 1 for one in results)
    fed = sum(one.fed for one in results)
    assert report["requests"] == 4
    assert report["draft"]["kind"] == "lookahead"
    assert set(report["gamma"]) == {"2"}
    figures = report["gamma"]["2"]
    assert (figures["steps"], figures["accepted"]) == (steps, sum(one.accepted for one in results))
    assert figures["steps_per_token"] == pytest.approx(steps / tokens)
    assert figures["steps_per_token_lower"] < figures["steps_per_token"] < figures["steps_per_token_upper"]
    assert report["run"] == {
        "records": 72,
        "chosen": 4,
        "decoding": "greedy",
        "fed": fed,
        "fed_per_step": pytest.approx(fed / steps),
    }
    assert sum(one["requests"] for one in report["by"]["domain"].values()) == 4
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [one["id"] for one in written] == [one.id for one in chosen]
    assert all(set(one["gamma"]) == {"2"} for one in written)


def test_the_printed_report_says_that_it_was_run() -> None:
    said = invoke(FILE, "--draft", SPEC.replace("requests=4", "requests=2"), "--target", str(TARGET))
    assert "run with the target, not replayed, on 2 of 72 records" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "the target itself is run, and greedily; give the target with --target"),
        (("--target", str(TARGET), "--rule", "rejection"), "greedily; leave out --rule"),
    ],
)
def test_a_run_needs_the_target_and_is_greedy(options: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(command, [FILE, "--draft", SPEC, *options])
    assert message in str(done.exception or done.output)


def test_the_share_is_no_part_of_the_identity() -> None:
    assert parse(SPEC).fingerprint == parse(SPEC.replace("requests=4", "requests=9")).fingerprint
    assert parse("lookahead:window=5,ngram=3,guesses=5").requests == 50
