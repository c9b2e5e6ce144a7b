"""EAGLE-3 against a real engine's record of serving the same head, window by window."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch

from driftwatch.acceptance import accepted_per_window
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.eagle3.checkpoint import Checkpoint
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.replay import replay
from driftwatch.shadow.target import Target

from .conftest import tokens_of, trace

GAMMA = 3
NEAR_TIE = 0.1
"""Gap of the draft's two best logits (float32) under which bfloat16 rounding in the engine may choose the other one."""


class Comparison(NamedTuple):
    compared: int
    windows: int
    engine_windows: int
    disagreements: list[tuple[str, int, int, int, float]]
    """(request, start, ours, the engine's, gap of the two best logits at the first proposal judged differently)"""

    @property
    def share_equal(self) -> float:
        return 1 - len(self.disagreements) / self.compared


def compare(draft: Eagle3Draft, name: str) -> Comparison:
    """Each window is judged at the engine's own boundary; each request's last one may run past the output."""
    records = trace(name)
    samples = [tokens_of(record) for record in records]
    results = {result.index: result.weights for result in replay(draft, samples, batch_tokens=8192)}
    compared = windows = engine_windows = 0
    disagreements = []
    for index, record in enumerate(records):
        weights = results[index]
        assert weights is not None
        assert record.engine is not None
        assert record.engine.accepted_per_window is not None
        windows += len(accepted_per_window(weights, GAMMA))
        engine_windows += len(record.engine.accepted_per_window)
        grid = np.concatenate([weights.by_start(GAMMA) == 1.0, np.zeros((weights.tokens, 1), bool)], axis=1)
        start, seen = 0, None
        for accepted in record.engine.accepted_per_window[:-1]:
            compared += 1
            ours = int(grid[start].argmin())
            if ours != accepted:
                seen = seen or _logits(draft, samples[index])
                best = seen[min(ours, accepted)][start].topk(2).values
                disagreements.append((record.id, start, ours, accepted, round(float(best[0] - best[1]), 4)))
            start += accepted + 1
    return Comparison(compared, windows, engine_windows, disagreements)


def _logits(draft: Eagle3Draft, sample: Tokens) -> list[torch.Tensor]:
    """The head's logits at every depth, [starts, Vd] each."""
    seen: list[torch.Tensor] = []
    compute = draft.head.logits

    def recording(out: torch.Tensor) -> torch.Tensor:
        seen.append(compute(out))
        return seen[-1]

    draft.head.logits = recording  # type: ignore[method-assign]
    try:
        draft.replay([sample])
    finally:
        draft.head.logits = compute  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(("name", "steps"), [("eagle3.T0", 2798), ("eagle3.T0.8", 3660)])
def test_every_window_of_a_real_engine_but_for_near_ties(
    eagle3: Checkpoint, target: Target, name: str, steps: int
) -> None:
    found = compare(Eagle3Draft(eagle3, target, depths=GAMMA), name)
    print(f"{name}: {found.compared} windows compared, near-ties: {found.disagreements}")
    assert found.compared == steps
    assert [one for one in found.disagreements if one[-1] >= NEAR_TIE] == []
    assert found.windows == pytest.approx(found.engine_windows, rel=0.005)


def test_an_engine_that_read_one_layer_too_low_is_reproduced(eagle3: Checkpoint, target: Target) -> None:
    lower = dataclasses.replace(eagle3, spec=dataclasses.replace(eagle3.spec, aux=(1, 3, 4)))
    found = compare(Eagle3Draft(lower, target, depths=GAMMA), "eagle3wrongids.T0")
    print(f"one layer too low: {found.compared} windows compared, near-ties: {found.disagreements}")
    assert [one for one in found.disagreements if one[-1] >= NEAR_TIE] == []
    assert found.windows == pytest.approx(found.engine_windows, rel=0.005)
    right = compare(Eagle3Draft(eagle3, target, depths=GAMMA), "eagle3wrongids.T0")
    print(f"right layers: {right.share_equal:.3f} of {right.compared} windows equal")
    assert right.share_equal < 0.92
    assert [one for one in right.disagreements if one[-1] >= NEAR_TIE] != []


def test_an_engine_fault_does_not_fit(eagle3: Checkpoint, target: Target) -> None:
    """The engine's verifier read uninitialised memory: text and acceptance are garbage, the replay says so."""
    found = compare(Eagle3Draft(eagle3, target, depths=GAMMA), "eagle3__stockbug.T0.8")
    print(f"fault: {found.share_equal:.3f} of {found.compared} windows equal")
    assert found.share_equal < 0.8
