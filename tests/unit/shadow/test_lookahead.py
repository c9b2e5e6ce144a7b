"""Lookahead decoding against the target's own greedy output, and against a walk that computes every branch alone."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from driftwatch.errors import ModelError
from driftwatch.records import read_records
from driftwatch.shadow.lookahead import session
from driftwatch.shadow.lookahead.branches import Pool
from driftwatch.shadow.lookahead.decoding import LookaheadResult, run
from driftwatch.shadow.lookahead.method import Lookahead, parse

DATA = Path(__file__).parents[2] / "data"
TARGET = DATA / "models" / "target"
NEAR_TIE = 0.1
"""Gap of the target's two best logits under which bfloat16 may choose the other one."""
LENGTH = 48


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The models are too small for more, and a fixed number keeps rounding the same from run to run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(dtype: torch.dtype) -> Any:
    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(TARGET, dtype=dtype).eval()


@pytest.fixture(scope="module")
def target() -> Any:
    return load(torch.float32)


def prompts(count: int) -> list[list[int]]:
    """Prompts of both domains, as served."""
    records = list(read_records([DATA / "traces" / "ngram3.T0.jsonl"]))
    return [record.prompt_token_ids or [] for record in records[:: len(records) // count]][:count]


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], length: int, stop: Sequence[int] = ()) -> list[int]:
    """Token by token, without a cache: nothing in common with what is tested."""
    ids = list(prompt)
    while len(ids) < len(prompt) + length and not (len(ids) > len(prompt) and ids[-1] in stop):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def expected(target: Any) -> list[list[int]]:
    return [greedy(target, prompt, LENGTH) for prompt in prompts(8)]


SPECS = [
    "lookahead:window=5,ngram=3,guesses=5",
    "lookahead:window=5,ngram=3,guesses=5,prompt=1",
    "lookahead:window=7,ngram=5,guesses=7,prompt=1",
    "lookahead:window=1,ngram=2,guesses=1",
    "lookahead:window=2,ngram=6,guesses=30",
]


@pytest.mark.parametrize("spec", SPECS)
def test_the_output_is_the_targets_greedy_output(target: Any, expected: list[list[int]], spec: str) -> None:
    chosen = parse(spec)
    results = run(target, prompts(8), chosen, max_tokens=LENGTH, stop=())
    assert [result.output for result in results] == expected
    for result in results:
        assert len(result.fed_per_step) == result.steps
        assert all(0 <= accepted < chosen.ngram for accepted in result.accepted_per_step)
        # Each step emits one token more than it accepts, but for a last one that the output's end cut.
        assert result.accepted + result.steps - (len(result.output) - 1) in (0, 1)
        assert result.compression == (LENGTH - 1) / result.steps
    tokens, steps = sum(len(one.output) - 1 for one in results), sum(one.steps for one in results)
    fed = sum(one.fed for one in results)
    print(f"{spec}: {tokens / steps:.2f} tokens a step, {fed / tokens:.1f} tokens fed for each")
    assert tokens / steps > 1.1


def test_double_precision_changes_nothing(target: Any) -> None:
    double = load(torch.float64)
    few = prompts(2)
    for spec in SPECS[:2]:
        results = run(double, few, parse(spec), max_tokens=LENGTH, stop=())
        assert [result.output for result in results] == [greedy(double, prompt, LENGTH) for prompt in few]
        assert results == run(target, few, parse(spec), max_tokens=LENGTH, stop=())


def test_bfloat16_parts_from_greedy_at_near_ties_alone() -> None:
    model = load(torch.bfloat16)
    double = load(torch.float64)
    parted = []
    for prompt in prompts(4):
        output = run(model, [prompt], parse(SPECS[0]), max_tokens=LENGTH, stop=())[0].output
        wanted = greedy(model, prompt, LENGTH)
        at = next((i for i, (a, b) in enumerate(zip(output, wanted, strict=True)) if a != b), None)
        if at is not None:
            with torch.inference_mode():
                best = double(torch.tensor([[*prompt, *output[:at]]])).logits[0, -1].topk(2).values
            parted.append(round(float(best[0] - best[1]), 4))
    print(f"bfloat16: {len(parted)} of 4 outputs part from greedy, at gaps of {parted}")
    assert all(gap < NEAR_TIE for gap in parted)


def tiny(kind: str) -> Any:
    """A random model of another family: learned positions, sliding layers among full ones, sliding layers alone."""
    torch.manual_seed(7)
    sizes = {
        "vocab_size": 24,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    more: dict[str, dict[str, Any]] = {
        "Llama": {"attention_bias": True},
        "Phi3": {},
        "Mistral": {"sliding_window": 9},
        "Gemma3Text": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "Gemma2": {"sliding_window": 9},
        "Qwen3": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
        "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    }
    if kind == "GPT2":
        sizes = {key: sizes[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = getattr(transformers, f"{kind}Config")(**sizes, **more[kind])
    loader: Any = AutoModelForCausalLM
    model = loader.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # as initialised, most models repeat their last token for ever
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


@pytest.mark.parametrize("kind", ["Llama", "Phi3", "Mistral", "Gemma3Text", "Gemma2", "Qwen3", "GPT2"])
@pytest.mark.parametrize("prefill", [8192, 5])
def test_other_families_and_sliding_windows(kind: str, prefill: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right to the target's last position, where the branches stand past it; with the prompt in one piece or many."""
    monkeypatch.setattr(session, "PREFILL", prefill)
    model = tiny(kind)
    pick = random.Random(1)
    some = [[pick.randrange(24) for _ in range(length)] for length in (1, 3, 14)]
    for prompt in some:
        length = 64 - len(prompt)
        result = run(model, [prompt], parse("lookahead:window=4,ngram=3,guesses=4,prompt=1"), max_tokens=length)[0]
        assert result.output == greedy(model, prompt, length)


@pytest.fixture(scope="module")
def small() -> Any:
    return tiny("Llama")


@torch.inference_mode()
def branch_by_branch(model: Any, prompt: list[int], chosen: Lookahead, length: int, seed: int) -> LookaheadResult:
    """The same decoding written out, with one full pass of its own for every token of every branch."""

    def after(ids: Sequence[int]) -> int:
        return int(model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1].argmax())

    size, height = chosen.ngram, chosen.ngram - 1
    pick = random.Random(seed)
    rows = [[pick.choice(prompt) for _ in range(chosen.window + size - 3)]]
    pool: list[tuple[int, ...]] = []

    def remember(ngram: Sequence[int]) -> None:
        if tuple(ngram) in pool:
            pool.remove(tuple(ngram))
        pool.append(tuple(ngram))
        same = [one for one in pool if one[0] == ngram[0]]
        if len(same) > chosen.guesses:
            pool.remove(same[0])

    text = [*prompt, after(prompt)]
    if chosen.prompt:
        for start in range(len(text) - size + 1):
            remember(text[start : start + size])
    accepted_per_step, fed, tried = [], [], []
    while len(text) < len(prompt) + length:
        guesses = [one[1:] for one in pool if one[0] == text[-1]]
        top = [text[-1], *rows[0]]
        columns = [[*top[: j + 1], *(row[j] for row in rows[1:])] for j in range(len(top))]
        new = [after([*text[:-1], *column]) for column in columns]
        emitted = [after(text)]
        for guess in guesses:
            true: list[int] = []
            for token in (*guess, None):
                true.append(after([*text, *guess[: len(true)]]))
                if true[-1] != token:
                    break
            if len(true) > len(emitted):
                emitted = true
        tried.append(len(guesses))
        fed.append(1 + sum(len(row) for row in rows) + size * len(guesses) - len(guesses))
        before = len(text)
        text += emitted[: len(prompt) + length - before]
        accepted_per_step.append(min(len(emitted) - 1, len(text) - before))
        if len(rows) == height:
            for j, column in enumerate(columns):
                remember([top[j], *column[j + 1 :], new[j]])
            rows = [(new if height == 1 else rows[1])[1:], *rows[2:], *([new] if height > 1 else [])]
        else:
            rows = [*(row[1:] for row in rows), new[1:]]
        if chosen.prompt:
            for end in range(before + 1, len(text) + 1):
                if end >= size:
                    remember(text[end - size : end])
    return LookaheadResult(text[len(prompt) :], accepted_per_step, fed, tried)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    st.builds(Lookahead, st.integers(1, 4), st.integers(2, 5), st.integers(1, 3), st.booleans()),
    st.integers(0, 3),
)
def test_every_step_is_that_of_branches_computed_alone(
    small: Any, prompt: list[int], chosen: Lookahead, seed: int
) -> None:
    found = run(small, [prompt], chosen, max_tokens=16, stop=(), seed=seed)
    assert found == [branch_by_branch(small, prompt, chosen, 16, seed)]


def test_the_pool_keeps_the_latest_ngrams_of_each_first_token() -> None:
    pool = Pool(Lookahead(window=1, ngram=2, guesses=2))
    pool.add_each([(1, 5), (1, 6), (2, 7), (1, 5), (1, 8)])
    assert pool.guesses(1) == [(5,), (8,)]  # 5 was seen again after 6
    assert pool.guesses(2) == [(7,)]
    assert pool.guesses(3) == []


def test_a_prompt_is_decoded_the_same_alone_and_among_others(target: Any) -> None:
    several = run(target, prompts(4), parse(SPECS[1]), max_tokens=24, stop=())
    assert several == [run(target, [prompt], parse(SPECS[1]), max_tokens=24, stop=())[0] for prompt in prompts(4)]


def test_the_output_ends_where_the_text_does(target: Any, expected: list[list[int]]) -> None:
    """In the middle of an accepted guess too: what lies behind the end is not counted."""
    cut_in_a_guess = 0
    for prompt, whole in zip(prompts(8), expected, strict=True):
        for stop in sorted(set(whole))[:3]:
            result = run(target, [prompt], parse(SPECS[1]), max_tokens=LENGTH, stop=[stop])[0]
            assert result.output == whole[: whole.index(stop) + 1]
            beyond = result.accepted + result.steps - (len(result.output) - 1)
            assert beyond in (0, 1)
            cut_in_a_guess += beyond
    assert cut_in_a_guess > 0


def test_the_targets_own_end_of_text_is_the_default(target: Any, expected: list[list[int]]) -> None:
    own = target.generation_config.eos_token_id
    try:
        target.generation_config.eos_token_id = [expected[0][9], expected[0][20]]
        result = run(target, prompts(8)[:1], parse(SPECS[0]), max_tokens=LENGTH)[0]
    finally:
        target.generation_config.eos_token_id = own
    ends = [expected[0].index(expected[0][at]) for at in (9, 20)]
    assert result.output == expected[0][: min(ends) + 1]


def test_one_token_takes_no_step(target: Any) -> None:
    result = run(target, prompts(1), parse(SPECS[0]), max_tokens=1)[0]
    assert (len(result.output), result.steps, result.fed, result.compression) == (1, 0, 0, None)


def test_a_repetitive_output_needs_far_fewer_steps(target: Any) -> None:
    """Where the text repeats itself every step emits about a whole n-gram."""
    loop = [715, 593, 202, 905, 1124] * 8
    plain = run(target, [loop], parse("lookahead:window=10,ngram=5,guesses=10,prompt=1"), max_tokens=LENGTH, stop=())
    assert plain[0].compression is not None
    assert plain[0].compression > 2.5


def test_a_sample_that_does_not_fit_is_refused(target: Any) -> None:
    for prompt, count in ([], 8), ([5] * 1000, 25):
        with pytest.raises(ModelError, match="do not fit into 1 to 1024") as caught:
            run(target, [prompt], parse(SPECS[0]), max_tokens=count)
        assert "\n" not in str(caught.value)


def test_a_target_that_cannot_attend_to_a_tree_is_refused(monkeypatch: pytest.MonkeyPatch, small: Any) -> None:
    monkeypatch.setattr(small.config, "layer_types", ["full_attention", "linear_attention"], raising=False)
    with pytest.raises(ModelError, match="cannot take back a step of linear_attention"):
        run(small, [[1]], parse(SPECS[0]), max_tokens=2)
    monkeypatch.setattr(small.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ModelError, match="needs sdpa or eager attention, not flash_attention_2"):
        run(small, [[1]], parse(SPECS[0]), max_tokens=2)


def test_the_fingerprint_is_the_parameters_in_one_spelling() -> None:
    one = parse("lookahead:guesses=5,window=5,ngram=3")
    assert one == Lookahead(5, 3, 5)
    assert one.fingerprint.path == "lookahead:window=5,ngram=3,guesses=5,prompt=0"
    assert one.fingerprint == parse("lookahead:window=5,ngram=3,guesses=5,prompt=0").fingerprint
    assert one.fingerprint.sha256 != parse("lookahead:window=5,ngram=3,guesses=5,prompt=1").fingerprint.sha256
    assert (one.fingerprint.kind, one.fingerprint.parameters) == ("lookahead", 0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lookahead", "`window` is missing; write lookahead:window=N,ngram=N,guesses=N"),
        ("lookahead:window=5,ngram=1,guesses=5", "`ngram` is '1'; give a whole number from 2 to 32"),
        ("lookahead:window=5,ngram=3,guesses=0", "`guesses` is '0'"),
        ("lookahead:window=5,ngram=3,guesses=5,prompt=yes", "`prompt` is 'yes'; give a whole number from 0 to 1"),
        ("lookahead:window=5,ngram=3,guess=5", "`guess` is no parameter of it"),
    ],
)
def test_bad_parameters_are_one_line(spec: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        parse(spec)
    assert "\n" not in str(caught.value)
