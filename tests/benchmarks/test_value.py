"""Predicted speedup, replay and cost profile, against the wall clock of transformers' assisted generation.

SmolLM2-135M as the target (270 MB, fetched once), on one CPU thread: pytest tests/benchmarks/test_value.py -s

For each draft the profile is taken first, through the same generation loop, on token ids that are no text; prompts of
the demo's traffic are then decoded plain and assisted in turn. Nothing is fitted to what is compared. What is timed is
decoding: from the end of the pass that holds the prompt to the end of the answer.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, StoppingCriteria

import driftwatch.demo
from driftwatch.acceptance import tally
from driftwatch.demo.prompts import Kind, prompts
from driftwatch.demo.target import fetch_target
from driftwatch.demo.train import load_draft
from driftwatch.drift.sums import Sums
from driftwatch.economics.profile import Bound, CostProfile
from driftwatch.economics.value import of_sums
from driftwatch.shadow.causal import Causal
from driftwatch.shadow.chain import ChainDraft
from driftwatch.shadow.draft import Fingerprint, Tokens
from driftwatch.shadow.profile.assisted import Assisted, generate
from driftwatch.shadow.profile.measure import Grid, measure
from driftwatch.shadow.target import Target

CPU = torch.device("cpu")
CLOCK = time.process_time if os.environ.get("BENCHMARK_CLOCK") == "process" else time.perf_counter
"""The wall's, unless the process's own time is asked for: of one thread, on a machine that others use too."""
PROMPTS = int(os.environ.get("BENCHMARK_PROMPTS", "8"))
REPEATS = int(os.environ.get("BENCHMARK_REPEATS", "3"))
TOKENS = int(os.environ.get("BENCHMARK_TOKENS", "64"))
PAIRS: Sequence[tuple[str, Kind, int]] = [
    ("distilled", "code", 2),
    ("distilled", "code", 5),
    ("distilled", "chat", 3),
    ("three layers", "code", 3),
    ("the target itself", "code", 3),
]


@dataclass(frozen=True)
class Answer:
    """One decoding of one prompt, from the end of the pass that held the prompt on.

    Until no whole window fits any more: transformers then proposes fewer tokens, which engines do not.
    """

    ids: list[int]
    """Prompt and answer up to there."""
    decoded: int
    """Tokens of them that ``seconds`` were spent on."""
    seconds: float


class _Passes(StoppingCriteria):
    """Notes how long the sequence was after each pass, and when; never stops anything."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.seen.append((input_ids.shape[1], CLOCK()))
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.fixture(scope="module")
def folder() -> Path:
    torch.set_num_threads(1)
    return fetch_target(Path(os.environ.get("BENCHMARK_CACHE") or Path.home() / ".cache" / "driftwatch"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Any:
    return Target(folder, device=CPU, dtype=torch.float32).model().model


@pytest.fixture(scope="module")
def drafts(target: Any) -> dict[str, Any]:
    """By name, each on the target's own vocabulary, as assisted generation needs it."""
    return {"distilled": _distilled(target), "three layers": _cut(target), "the target itself": copy.deepcopy(target)}


def _distilled(target: Any) -> Any:
    """The demo's draft with the target's whole vocabulary: tokens that it does not know are fed as its unknown one, and
    are proposed only where it would propose nothing (a logit of 0)."""
    small = load_draft(Path(driftwatch.demo.__file__).parent / "draft")
    settings = small.model.config.to_dict() | {"vocab_size": target.config.vocab_size, "tie_word_embeddings": False}
    model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    state = small.model.state_dict()
    rows = state["model.embed_tokens.weight"]
    table = small.from_target_ids(target.config.vocab_size)
    head = torch.zeros(target.config.vocab_size, rows.shape[1])
    head[small.target_ids] = rows
    model.load_state_dict(state | {"model.embed_tokens.weight": rows[table], "lm_head.weight": head})
    return model.float().eval()


def _cut(target: Any) -> Any:
    model = copy.deepcopy(target)
    layers = model.model.layers
    model.model.layers = torch.nn.ModuleList([layers[0], layers[1], layers[-1]])
    model.config.num_hidden_layers = 3
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = i
    return model.eval()


def _decode(model: Any, ids: torch.Tensor, assistant: Any, gamma: int) -> Answer:
    passes = _Passes()
    out = generate(model, ids, TOKENS, assistant, gamma, stopping_criteria=[passes])
    first, began = passes.seen[0]
    last, ended = [(length, at) for length, at in passes.seen if length <= out.shape[1] - 1 - gamma][-1]
    return Answer(out[0, :last].tolist(), last - first, ended - began)


@pytest.fixture(scope="module")
def questions(folder: Path) -> dict[str, list[torch.Tensor]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    found = {}
    for kind in ("code", "chat"):
        chats = [[{"role": "user", "content": text}] for text in prompts(kind, "traffic")[:PROMPTS]]
        encoded = (tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True) for chat in chats)
        found[kind] = [torch.tensor([one["input_ids"]]) for one in encoded]
    return found


@pytest.mark.timeout(3600)
def test_prediction_against_assisted_generation(
    target: Any, drafts: dict[str, Any], questions: dict[str, list[torch.Tensor]]
) -> None:
    found, profiles = [], {}
    for name, kind, gamma in PAIRS:
        if name not in profiles:
            profiles[name] = _profile(target, drafts[name], sorted({g for n, _, g in PAIRS if n == name}))
        profile = profiles[name]
        predicted, measured = _compare(target, drafts[name], questions[kind], gamma, profile)
        found.append((name, kind, gamma, predicted, measured))
        error = profile.error.rms if profile.error else 0.0
        print(
            f"\n{name}, {kind}, gamma {gamma}: predicted {predicted:.3f}, measured {measured:.3f}, "
            f"ratio {predicted / measured:.3f}, fit {error:.1%}"
        )
    assert any(measured > 1.0 for *_, measured in found)
    assert any(measured < 1.0 for *_, measured in found)
    for name, kind, gamma, predicted, measured in found:
        assert (predicted > 1.0) == (measured > 1.0), (name, kind, gamma)
        assert 0.85 <= predicted / measured <= 1.15, (name, kind, gamma)


def _profile(target: Any, draft: Any, gammas: Sequence[int]) -> CostProfile:
    loop = Assisted(target, draft, CLOCK)
    grid = Grid.of(CPU, contexts=(32, 128), gammas=gammas, most_sequences=loop.most_sequences)
    return CostProfile.fitted(Bound("cpu", "float32", "SmolLM2-135M"), measure(loop, grid, drafted=True))


def _compare(
    target: Any, draft: Any, questions: Sequence[torch.Tensor], gamma: int, profile: CostProfile
) -> tuple[float, float]:
    """Predicted and measured speedup of decoding, over all tokens of all prompts."""
    chain = ChainDraft(Causal(draft), None, 0, Fingerprint("chain", "0", 0, target.config.vocab_size, "draft"))
    sums, contexts = Sums.zero(gamma), []
    plain_s = assisted_s = 0.0
    for ids in questions:
        plain, assisted = [], []
        for _ in range(REPEATS):
            plain.append(_decode(target, ids, None, 0))
            assisted.append(_decode(target, ids, draft, gamma))
        one = assisted[0]
        # The first window shares the prompt's pass: what is judged begins with its last token.
        start = len(one.ids) - one.decoded - 1
        tokens = Tokens(one.ids[:start], one.ids[start:])
        (weights,) = chain.replay([tokens])
        sums += Sums.request(tally(weights, gamma))
        contexts.append(start + one.decoded / 2)
        per_token = median(answer.seconds / answer.decoded for answer in plain)
        plain_s += per_token * one.decoded
        assisted_s += median(answer.seconds for answer in assisted)
    context = sum(contexts) / len(contexts)
    (value,) = of_sums(sums, profile, batch=1, context=context, gammas=[gamma])
    assert value.served.value is not None
    return value.served.value, plain_s / assisted_s
