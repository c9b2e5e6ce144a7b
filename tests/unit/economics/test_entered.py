"""Costs written down by hand."""

from __future__ import annotations

from typing import Any

import pytest

from driftwatch.economics.entered import entered
from driftwatch.errors import ProfileError


def test_c_and_v_come_back() -> None:
    rows = [
        {"batch": 1, "step_ms": 20, "c": 0.1, "v": {4: 1.0}},
        {"batch": 16, "step_ms": 23, "c": 0.1, "v": {4: 1.5217391304347827}},
    ]
    found = entered({"device": "H200", "batches": rows})
    assert found.origin == "entered"
    assert found.bound.device == "H200"
    for batch, step in ((1, 0.020), (16, 0.023)):
        cost = found.cost(batch, 4)
        assert cost.plain_s == pytest.approx(step, rel=0.02)
        assert cost.draft == pytest.approx(0.1, rel=0.02)
        assert not cost.outside
    assert found.cost(16, 4).verify == pytest.approx(1.52, rel=0.03)
    assert "batch 32" in found.cost(32, 4).outside[0]


def test_without_c_there_is_no_draft() -> None:
    found = entered({"batches": [{"batch": 1, "step_ms": 20, "v": {4: 1.1}}]})
    assert found.draft is None
    with pytest.raises(ProfileError, match="no draft"):
        found.cost(1, 4)
    assert found.with_draft(0.0).cost(1, 4).window == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "`batches` must hold"),
        ({"batches": []}, "`batches` must hold"),
        ({"bathces": []}, "unknown key `bathces`"),
        ({"batches": [{"batch": 1}]}, r"`batches\[0\]` needs batch and step_ms"),
        ({"batches": [{"batch": 1, "step_ms": 20, "w": 1}]}, "unknown key `w`"),
        ({"batches": [{"batch": 1, "step_ms": 0}]}, r"`batches\[0\]`: a pass takes a positive time"),
        ({"batches": [{"batch": 1, "step_ms": "slow"}]}, r"`batches\[0\]`: could not convert"),
        ({"batches": [{"batch": 1, "step_ms": 20, "v": [1.0]}]}, r"`batches\[0\]`"),
        ({"batches": [7]}, r"`batches\[0\]` needs"),
        ({"batches": [{"batch": 1, "step_ms": 20, "v": {0: 1.0}}]}, "by whole numbers of tokens, at least 1, not 0"),
        ({"batches": [{"batch": 1, "step_ms": 20, "v": {4.5: 1.0}}]}, "by whole numbers of tokens"),
        ({"batches": [{"batch": 1, "step_ms": 20}], "shape": "star"}, "write chain, block"),
        ({"batches": [{"batch": 1, "step_ms": 20, "c": 0}, {"batch": 2, "step_ms": 20, "c": 1}]}, "`c` is 0 in some"),
        ({"batches": [{"batch": float("nan"), "step_ms": 20}]}, r"`batches\[0\]`: batch nan"),
    ],
)
def test_what_is_wrong_is_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        entered(data)


def test_a_context_that_nobody_said_is_none_to_lie_outside_of() -> None:
    rows = [{"batch": batch, "step_ms": 20, "c": 0.1, "v": {4: 1.05}} for batch in (1, 8)]
    assert entered({"batches": rows}).cost(4, 4, 3000.0).outside == ()
    said = entered({"batches": [row | {"context": 500} for row in rows]})
    assert said.cost(4, 4, 3000.0).outside == ("context 3000 lies outside what was measured, 500 to 500",)


def test_a_draft_that_costs_nothing_and_one_of_another_shape() -> None:
    free = entered({"batches": [{"batch": 1, "step_ms": 20, "c": 0, "v": {4: 1.1}}], "shape": "block"})
    assert free.cost(1, 4).window == pytest.approx(1.1)
    assert str(free.shape) == "block"
    tree = {"batches": [{"batch": 1, "step_ms": 20, "c": 0.1, "v": {7: 1.5}}], "shape": "steps=5,topk=4,tokens=8"}
    assert entered(tree).cost(1, 5).window == pytest.approx(5 * 0.1 + 1.5, rel=0.01)
    assert entered(tree).cost(1, 5).outside == ()
