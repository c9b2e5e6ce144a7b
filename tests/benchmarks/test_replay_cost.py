"""Ratios of a replay to its floor, on SmolLM2-135M as the target (270 MB, fetched once): pytest tests/benchmarks -s"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from driftwatch.demo.target import fetch_target
from driftwatch.shadow.causal import Causal
from driftwatch.shadow.chain import ChainDraft
from driftwatch.shadow.draft import Fingerprint, Tokens
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.target import Target

from .cost import assisted_rate, chain_ratio, eagle3_ratio, head_for, padding, samples

CPU = torch.device("cpu")
SHARES = [(4, 1), (1, 4)]
BATCH_TOKENS = 4096
TOTAL = 2400
REPEATS = 2


@pytest.fixture(scope="module")
def target() -> Target:
    torch.set_num_threads(1)
    cache = Path(os.environ.get("BENCHMARK_CACHE") or Path.home() / ".cache" / "driftwatch")
    return Target(fetch_target(cache), device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def cut(target: Target) -> Any:
    """A chain draft of the target's own first and last layers."""
    model = copy.deepcopy(target.model().model)
    layers = model.model.layers
    model.model.layers = torch.nn.ModuleList([layers[0], layers[1], layers[-1]])
    model.config.num_hidden_layers = 3
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = i
    return model.eval()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("share", SHARES)
def test_chain(cut: Any, share: tuple[int, int]) -> None:
    draft = ChainDraft(Causal(cut), None, 0, Fingerprint("chain", "0", 0, 49_152, "cut"))
    found = samples(TOTAL, prompt=share[0], output=share[1], vocabulary=49_000)
    figures = chain_ratio(draft, found, BATCH_TOKENS, REPEATS)
    print(f"\nchain, prompt:output {share}: {_shown(figures)}")
    assert figures["ratio"] <= 1.15


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("share", SHARES)
def test_eagle3(target: Target, cut: Any, share: tuple[int, int]) -> None:
    draft = Eagle3Draft(head_for(target.model(), 16_000), target, depths=7)
    found = samples(TOTAL, prompt=share[0], output=share[1], vocabulary=49_000)
    figures = eagle3_ratio(draft, target, found, BATCH_TOKENS, REPEATS)
    few = [Tokens(one.prompt, one.output[:100]) for one in found if one.length < 400][:1]
    decoded = assisted_rate(target, cut, few, 7)
    figures |= {"assisted_per_s": decoded, "faster": figures["judged_per_s"] / decoded}
    print(f"\neagle3, prompt:output {share}: {_shown(figures)}")
    assert figures["ratio"] <= 1.2


def test_padding() -> None:
    for share in SHARES:
        found = samples(400_000, prompt=share[0], output=share[1], vocabulary=100)
        print(f"\npadding, {len(found)} samples: {padding(found, 16_384):.3f}")
        assert padding(found, 16_384) <= 0.15


def _shown(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
