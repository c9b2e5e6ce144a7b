"""Assisted generation, cut into the times of its passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from driftwatch.shadow.causal import load_model
from driftwatch.shadow.profile.assisted import Assisted, _Mark, generate
from driftwatch.shadow.target import Target
from tests.unit.shadow.conftest import CPU, DATA


@pytest.fixture(scope="module")
def assistant() -> Any:
    return load_model("draft", DATA / "models" / "chain", device=CPU, dtype=torch.float32)


def test_it_generates_what_plain_decoding_generates(target: Target, assistant: Any) -> None:
    model, ids = target.model().model, torch.arange(30)[None]
    plain = generate(model, ids, 20, None, 0)
    assert plain.shape == (1, 50)
    assert torch.equal(generate(model, ids, 20, assistant, 3), plain)


def test_windows_have_the_asked_number_of_proposals(target: Target, assistant: Any) -> None:
    loop = Assisted(target.model().model, assistant)
    assert loop.most_sequences == 1
    for gamma in (4, 1, 0):
        laps = loop.laps(1, 24, gamma)
        assert len(laps) >= 3
        # The last proposal's time holds the winding up; only the others are a proposal's own.
        assert {len(lap.drafts) for lap in laps} == {max(gamma - 1, min(gamma, 1))}


def test_the_parts_add_up_to_the_windows(target: Target) -> None:
    """Verification at 0 and 10, three proposals of one second each, of which the last one takes two more to wind up."""
    loop = Assisted(target.model().model)
    starts = [(False, 30, 0.0), (True, 1, 1.0), (True, 1, 2.0), (True, 1, 3.0)]  # holds the prefill: left out
    for at in (6.0, 16.0):
        starts += [(False, 4, at), (True, 1, at + 5), (True, 1, at + 6), (True, 1, at + 7)]
    starts.append((False, 4, 26.0))
    laps = list(loop._laps([_Mark(*start) for start in starts], 3))
    assert [(lap.verify, list(lap.drafts)) for lap in laps] == [(7.0, [1.0, 1.0])] * 2
    # A single proposal is known from longer windows.
    single = [_Mark(False, 2, float(t)) for t in (0, 9, 18)]
    between = [_Mark(True, 1, float(t)) for t in (5, 14)]
    marks = sorted([*single, *between], key=lambda mark: mark.at)
    assert [lap.verify for lap in loop._laps(marks, 1)] == [8.0]


def test_hooks_are_gone_afterwards(target: Target, assistant: Any) -> None:
    model = target.model().model
    before = len(model._forward_pre_hooks)
    Assisted(model, assistant).laps(1, 8, 1)
    assert len(model._forward_pre_hooks) == before
