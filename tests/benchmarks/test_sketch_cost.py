"""What a sketch costs beside the replay that it accompanies, as a ratio in one run: pytest tests/benchmarks -s"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from driftwatch.acceptance import DEFAULT_GAMMA
from driftwatch.drift.sketch.build import Row, build
from driftwatch.shadow.draft import Draft, Tokens
from driftwatch.shadow.open import Opening, open_draft
from driftwatch.shadow.replay import replay
from driftwatch.shadow.splits import splits

ROOT = Path(__file__).parents[2]
DRAFT = ROOT / "driftwatch" / "demo" / "draft"
"""Six million parameters: smaller than any that is served, so the ratio is an upper one."""
VOCABULARY = 49_152
TOKENS = 5000
BOUND = 0.05


@pytest.mark.parametrize("prompt", [40, 1000])
def test_a_sketch_costs_little_beside_its_replay(prompt: int) -> None:
    """Prompts of one length and 32 tokens of output, as many as one lease may bring."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)

    def text(tokens: int) -> list[int]:
        found: list[int] = rng.integers(1, VOCABULARY, tokens).tolist()
        return found

    prompts = [np.array(text(60)) for _ in range(500)]
    embedding = rng.normal(size=(VOCABULARY, 64)).astype(np.float32)
    sketch = build([Row(ids, ids) for ids in prompts], embedding, draft="d")
    draft = open_draft(DRAFT, Opening(torch.device("cpu"), torch.float32, depths=DEFAULT_GAMMA))
    samples = [Tokens(text(prompt), text(32)) for _ in range(min(TOKENS // prompt, 64))]
    ratio = _seconds(lambda: splits(sketch, samples)) / _seconds(lambda: _replayed(draft, samples))
    print(f"\ndraft of {draft.fingerprint.parameters:,} parameters, {prompt} prompt tokens: {ratio:.4f}")
    assert ratio <= BOUND


def _replayed(draft: Draft, samples: list[Tokens]) -> None:
    assert sum(result.weights is not None for result in replay(draft, samples, batch_tokens=16_384)) == len(samples)


def _seconds(work: Callable[[], object]) -> float:
    """The process's own time, the least of three runs."""
    work()
    found = []
    for _ in range(3):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)
