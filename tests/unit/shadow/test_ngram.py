"""Prompt lookup against a real engine's record without exception, and against a search that tries every place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftwatch.acceptance import Tally, Weights, accepted_per_window, tally
from driftwatch.errors import ModelError
from driftwatch.records import EngineFigures, Record, read_records
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.ngram import NgramDraft, parse
from driftwatch.shadow.replay import replay

TRACES = Path(__file__).parents[2] / "data" / "traces"
GAMMA = 3


def naive(context: Sequence[int], shortest: int, longest: int, gamma: int) -> list[int]:
    """The rule as it reads, trying every place for every length."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(context) - size):
            if list(context[start : start + size]) == list(context[-size:]):
                return list(context[start + size : start + size + gamma])
    return []


def decoded(prompt: Sequence[int], output: Sequence[int], shortest: int, longest: int, gamma: int) -> list[list[int]]:
    """[drafted, accepted] of every step of an engine that emits this output; [0, 0] is a plain step."""
    steps, done = [], 1
    while done < len(output):
        proposed = naive([*prompt, *output[:done]], shortest, longest, gamma)
        pairs = zip(proposed, output[done:], strict=False)
        accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(proposed), len(output) - done))
        steps.append([len(proposed), accepted])
        done += accepted + 1
    return steps


def walked(weights: Weights, gamma: int) -> list[list[int]]:
    """[start, drafted, accepted] of every step of the replay."""
    assert weights.proposals is not None
    steps, start = [], 0
    while start < weights.tokens:
        made = min(int(weights.proposals[start]), gamma)
        accepted = int(np.append(weights.values[start, :made], 0.0).argmin())
        steps.append([start, made, accepted])
        start += accepted + 1
    return steps


def tokens_of(record: Record) -> Tokens:
    assert record.prompt_token_ids is not None
    assert record.output_token_ids is not None
    return Tokens(record.prompt_token_ids, record.output_token_ids)


def replayed(name: str, gamma: int = 8) -> list[tuple[Record, EngineFigures, Weights]]:
    """Every request of a trace, with the replay of a larger gamma than the engine's: the smaller one is in it."""
    records = list(read_records([TRACES / f"{name}.jsonl"]))
    results = list(replay(NgramDraft(1, 3, gamma), [tokens_of(record) for record in records], batch_tokens=4096))
    weights = {result.index: result.weights for result in results}
    rows = []
    for index, record in enumerate(records):
        found = weights[index]
        assert found is not None
        assert record.engine is not None
        rows.append((record, record.engine, found))
    return rows


@pytest.mark.parametrize(("name", "windows", "plain"), [("ngram3.T0", 1616, 1311), ("ngram3.T0.8", 1424, 2827)])
def test_every_window_of_a_real_engine_without_exception(name: str, windows: int, plain: int) -> None:
    """Accepted and drafted per window, windows and plain steps; only the last window may run past the output."""
    compared = plain_steps = 0
    total = Tally.zero(GAMMA)
    for record, engine, weights in replayed(name):
        assert engine.accepted_per_window is not None
        assert engine.drafted_per_window is not None
        steps = walked(weights, GAMMA)
        ours = [step for step in steps if step[1]]
        plain_here = len(steps) - len(ours)
        assert [step[2] for step in ours[:-1]] == engine.accepted_per_window[:-1], record.id
        assert [step[1] for step in ours] == engine.drafted_per_window, record.id
        assert accepted_per_window(Weights(weights.values[:, :GAMMA], weights.proposals), GAMMA) == [
            step[2] for step in ours
        ]
        # The engine records no plain step, but every token is of one or of a window; only the last may emit too many.
        emitted = sum(engine.accepted_per_window) + len(ours)
        last_start, _, last_accepted = ours[-1]
        beyond = engine.accepted_per_window[-1] + 1 - min(last_accepted + 1, weights.tokens - last_start)
        assert beyond == 0 or last_start + last_accepted + 1 >= weights.tokens
        assert plain_here == weights.tokens + beyond - emitted, record.id
        compared += len(ours) - 1
        plain_steps += plain_here
        total += tally(weights, GAMMA)
        assert tally(weights, GAMMA).drafted[-1] == engine.drafted
    print(f"{name}: {compared} windows compared, {plain_steps} plain steps")
    assert (compared, plain_steps) == (windows, plain)
    assert total.steps[-1] - total.windows[-1] == plain


def test_an_engine_that_verifies_wrongly_does_not_fit() -> None:
    """A vLLM whose verifier divides by uninitialised memory: it proposes by the same rule, and accepts next to nothing.

    Replay says what a sound verifier would have accepted of the served tokens; the gap is the engine's fault.
    """
    compared = proposals_equal = accepted_equal = engine_accepted = engine_windows = 0
    total = Tally.zero(GAMMA)
    for _, engine, weights in replayed("ngram3__stockbug.T0.8"):
        assert engine.accepted_per_window is not None
        assert engine.drafted_per_window is not None
        assert weights.proposals is not None
        start = 0
        windows = list(zip(engine.drafted_per_window, engine.accepted_per_window, strict=True))
        for drafted, accepted in windows[:-1]:
            while weights.proposals[start] == 0:
                start += 1
            ours = int(np.append(weights.values[start, :drafted], 0.0).argmin())
            compared += 1
            proposals_equal += min(int(weights.proposals[start]), GAMMA) == drafted
            accepted_equal += ours == accepted
            start += accepted + 1
        engine_accepted += sum(engine.accepted_per_window)
        engine_windows += len(windows)
        total += tally(weights, GAMMA)
    print(f"stock bug: {compared} windows, proposals equal {proposals_equal}, accepted equal {accepted_equal}")
    assert proposals_equal == compared
    assert 0.4 < accepted_equal / compared < 0.6
    assert total.accepted[-1] > 10 * engine_accepted
    assert total.windows[-1] < 0.6 * engine_windows


tokens = st.lists(st.integers(0, 3), min_size=0, max_size=40)
outputs = st.lists(st.integers(0, 3), min_size=2, max_size=40)
sizes = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted)


@settings(max_examples=300, deadline=None)
@given(tokens, outputs, sizes, st.integers(1, 8))
def test_every_start_proposes_what_a_plain_search_finds(
    prompt: list[int], output: list[int], size: list[int], gamma: int
) -> None:
    shortest, longest = size
    weights = NgramDraft(shortest, longest, gamma).replay([Tokens(prompt, output)])[0]
    assert weights.proposals is not None
    for start in range(len(output) - 1):
        proposed = naive([*prompt, *output[: start + 1]], shortest, longest, gamma)
        served = output[start + 1 :]
        expected = [float(d < min(len(proposed), len(served)) and proposed[d] == served[d]) for d in range(gamma)]
        assert weights.proposals[start] == len(proposed)
        assert weights.values[start].tolist() == expected


@settings(max_examples=200, deadline=None)
@given(tokens, outputs, sizes)
def test_one_replay_holds_every_smaller_gamma(prompt: list[int], output: list[int], size: list[int]) -> None:
    """Steps, windows, drafted and accepted of an engine that decodes with each gamma."""
    shortest, longest = size
    weights = NgramDraft(shortest, longest, 6).replay([Tokens(prompt, output)])[0]
    counts = tally(weights, 6)
    for gamma in range(1, 7):
        steps = decoded(prompt, output, shortest, longest, gamma)
        assert [step[1:] for step in walked(weights, gamma)] == steps
        assert counts.steps[gamma - 1] == len(steps)
        assert counts.windows[gamma - 1] == sum(1 for made, _ in steps if made)
        assert counts.drafted[gamma - 1] == sum(made for made, _ in steps)
        assert counts.accepted[gamma - 1] == sum(accepted for _, accepted in steps)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), sizes, st.integers(1, 8))
def test_proposals_begin_with_those_of_a_smaller_gamma(context: list[int], size: list[int], gamma: int) -> None:
    shortest, longest = size
    less = NgramDraft(shortest, longest, gamma).propose(context)
    more = NgramDraft(shortest, longest, gamma + 1).propose(context)
    assert less == naive(context, shortest, longest, gamma)
    assert more[:gamma] == less


@pytest.mark.parametrize(
    ("context", "proposed"),
    [
        ([1, 2, 3, 4, 2, 3], [4, 2, 3]),  # vLLM's own example: fewer at the context's end
        ([5, 6, 7, 5, 6, 8, 5, 6], [7, 5, 6, 8]),  # the earliest, not the latest
        ([6, 9, 5, 6, 7, 5, 6], [7, 5, 6]),  # the longest, not the earliest of a shorter one
        ([1, 1, 1], [1]),  # an occurrence may overlap the suffix
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_the_longest_suffix_at_its_earliest_place(context: list[int], proposed: list[int]) -> None:
    assert NgramDraft(1, 2, 4).propose(context) == proposed


def test_the_first_output_token_is_context_and_never_judged() -> None:
    weights = NgramDraft(1, 3, 2).replay([Tokens([7, 8, 9], [7, 8, 5])])[0]
    assert weights.proposals is not None
    assert weights.proposals.tolist() == [2, 2]
    assert weights.values.tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_samples_too_short_to_be_judged_are_skipped() -> None:
    results = replay(NgramDraft(1, 3), [Tokens([1, 2], [1]), Tokens([2**31 - 1], [2**31 - 1, 4])], batch_tokens=64)
    assert {result.index: result.skipped for result in results} == {0: "too_short", 1: None}


def seconds(sample: Tokens) -> float:
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        NgramDraft(1, 5, 8).replay([sample])
        best = min(best, time.perf_counter() - began)
    return best


@pytest.mark.parametrize("vocabulary", [1, 50, 100_000])
def test_a_long_sample_takes_time_in_proportion(vocabulary: int) -> None:
    """Ten times the tokens: a scan at every start would take a hundred times as long."""
    ids = np.random.default_rng(0).integers(0, vocabulary, 100_000).tolist()
    short, long = seconds(Tokens(ids[:5_000], ids[5_000:10_000])), seconds(Tokens(ids[:50_000], ids[50_000:]))
    print(f"vocabulary {vocabulary}: 100,000 tokens in {long:.3f} s, {long / short:.1f} times those of 10,000")
    assert long < 3
    assert long < 40 * short


def test_the_fingerprint_is_the_parameters_in_one_spelling() -> None:
    one, other = parse("ngram:min=1,max=3"), parse("ngram: max=3, min=1", gamma=3)
    assert one.fingerprint == other.fingerprint
    assert one.fingerprint.kind == "ngram"
    assert one.fingerprint.path == "ngram:min=1,max=3"
    assert one.fingerprint.parameters == 0
    assert one.fingerprint.sha256 != parse("ngram:min=2,max=3").fingerprint.sha256


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ngram", "`min` is missing; write ngram:min=N,max=N"),
        ("ngram:min=1", "`max` is missing"),
        ("ngram:min=0,max=3", "`min` is '0'; give a whole number from 1 to 128"),
        ("ngram:min=1,max=1e3", "`max` is '1e3'"),
        ("ngram:min=1,max=", "`max` is ''"),
        ("ngram:min=1,max=9999999999999", "`max` is '9999999999999'"),
        ("ngram:min=4,max=3", "`min` is 4, more than `max` = 3"),
        ("ngram:min=1,max=3,gamma=2", "`gamma` is no parameter of it"),
        ("ngram:min=1,min=2,max=3", "`min` is given twice, the second time as '2'"),
        ("lookahead:min=1,max=3", "not a draft of kind ngram"),
    ],
)
def test_bad_parameters_are_one_line(spec: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        parse(spec)
    assert "\n" not in str(caught.value)
    assert spec in str(caught.value)


@pytest.mark.parametrize(("shortest", "longest", "gamma"), [(0, 3, 1), (3, 2, 1), (1, 1, 0)])
def test_impossible_sizes_are_refused(shortest: int, longest: int, gamma: int) -> None:
    with pytest.raises(ValueError, match=f"min {shortest}, max {longest}, gamma {gamma}"):
        NgramDraft(shortest, longest, gamma)


def test_the_rejection_rule_judges_no_sample_whose_sampling_is_unknown() -> None:
    samples = [Tokens([1, 2], [1, 2, 1]), Tokens([1, 2], [1, 2, 1], temperature=0.8)]
    for rule, reasons in (("argmax", {0: None, 1: None}), ("rejection", {0: "sampling_unknown", 1: None})):
        draft = parse("ngram:min=1,max=3", rule=rule)  # type: ignore[arg-type]
        assert {one.index: one.skipped for one in replay(draft, samples, batch_tokens=64)} == reasons
