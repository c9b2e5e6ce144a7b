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
    ],
)
def test_what_is_wrong_is_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        entered(data)
