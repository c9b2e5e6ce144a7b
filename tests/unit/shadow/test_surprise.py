"""The target's surprise at what was served: against transformers itself, and higher for another target's tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.surprise import ONE_IN, Surprise, is_chosen, model_of, surprise
from driftwatch.shadow.target import Target

DATA = Path(__file__).parents[2] / "data"
CPU = torch.device("cpu")


def served(name: str, count: int) -> list[Tokens]:
    """Requests of a real engine, which sampled from this target."""
    lines = (DATA / "traces" / f"{name}.jsonl").read_text().splitlines()[:count]
    return [Tokens(row["prompt_token_ids"], row["output_token_ids"]) for row in map(json.loads, lines)]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(DATA / "models" / "target", device=CPU, dtype=torch.float32)


def test_sums_are_those_of_transformers(target: Target) -> None:
    (tokens,) = served("draft3.T0.8", 1)
    model: Any = AutoModelForCausalLM.from_pretrained(DATA / "models" / "target", dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*tokens.prompt, *tokens.output]])).logits[0, len(tokens.prompt) : -1]
    logprobs = logits.log_softmax(-1)
    logprob = float(logprobs.gather(1, torch.tensor(tokens.output[1:])[:, None]).sum())
    entropy = float(-(logprobs.exp() * logprobs).sum())
    found = surprise(target.model(), tokens)
    assert found is not None
    assert found.tokens == len(tokens.output) - 1
    assert found.logprob == pytest.approx(logprob, abs=1e-2)
    assert found.entropy == pytest.approx(entropy, abs=1e-2)


def test_tokens_that_another_verifier_served_surprise(target: Target) -> None:
    """The verifier's bug serves partly garbage: of its requests half lie above all but one of the right engine's."""

    def excess(name: str) -> list[float]:
        found = [surprise(target.model(), tokens) for tokens in served(name, 20)]
        return [(-one.logprob - one.entropy) / one.tokens for one in found if one is not None]

    right, wrong = excess("eagle3.T0.8"), excess("eagle3__stockbug.T0.8")
    assert (len(right), len(wrong)) == (20, 20)
    cut = sorted(right)[18]
    assert sum(one > cut for one in wrong) > 8


def test_what_cannot_be_judged_is_none(target: Target) -> None:
    model = target.model()
    assert surprise(model, Tokens([1], [2])) is None
    assert surprise(model, Tokens([1], [2, model.token_ids])) is None
    assert surprise(model, Tokens([], [2, 3])) is None


def test_a_target_that_is_not_there_costs_nothing(tmp_path: Path) -> None:
    assert model_of(Target(tmp_path, device=CPU, dtype=torch.float32), CPU) is None


def test_a_share_is_chosen_by_number_alone() -> None:
    chosen = [is_chosen(i) for i in range(8000)]
    assert chosen == [is_chosen(i) for i in range(8000)]
    assert 8000 / ONE_IN * 0.85 < sum(chosen) < 8000 / ONE_IN * 1.15
    for period in (2, 3, 7):
        part = sum(chosen[::period]) / len(chosen[::period])
        assert 0.8 / ONE_IN < part < 1.2 / ONE_IN


def test_figures_round_as_they_are_stored() -> None:
    assert Surprise(3, -1.23456, 2.0).as_dict() == {"compared": 3, "logprob": -1.2346, "entropy": 2.0}
