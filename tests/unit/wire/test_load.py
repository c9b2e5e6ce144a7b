"""An engine's load, from its own metrics as recorded and as documented."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.wire.load import Buckets, requests_waiting, share_over, time_per_output_token

RECORDED = (Path(__file__).parents[2] / "data/metrics/draft3.T0.metrics_after.txt").read_text()


def test_a_recorded_vllm() -> None:
    assert requests_waiting(RECORDED) == 0.0
    buckets = time_per_output_token(RECORDED)
    finished = next(
        float(line.split()[-1])
        for line in RECORDED.splitlines()
        if line.startswith("vllm:request_time_per_output_token_seconds_count")
    )
    assert max(buckets) == math.inf
    assert buckets[math.inf] == finished > 0
    assert list(buckets.values()) == sorted(buckets.values())


@pytest.mark.parametrize(
    ("text", "waiting"),
    [
        ('sglang:num_queue_reqs{model_name="m",tp_rank="0",dp_rank="0"} 3.0\n', 3.0),
        (
            'sglang:num_queue_reqs{tp_rank="0",dp_rank="0"} 3.0\nsglang:num_queue_reqs{tp_rank="0",dp_rank="1"} 4.0\n',
            7.0,
        ),
        ('sglang:num_queue_reqs{tp_rank="0"} 3.0\nsglang:num_queue_reqs{tp_rank="1"} 3.0\n', 3.0),
        ('trtllm_num_requests_waiting{model_name="m"} 2\n', 2.0),
        ("vllm:num_requests_waiting 5\n", 5.0),
        ('vllm:num_requests_waiting_by_reason{reason="capacity"} 5\n', None),
        ("# HELP vllm:num_requests_waiting x\nother_num_requests_waiting 5\n", None),
    ],
)
def test_queues(text: str, waiting: float | None) -> None:
    assert requests_waiting(text) == waiting


def test_share_between_two_readings() -> None:
    earlier: Buckets = {0.05: 100, 0.1: 100, math.inf: 100}
    later: Buckets = {0.05: 190, 0.1: 198, math.inf: 200}
    assert share_over(0.1, earlier, later) == pytest.approx((0.02, 100))
    assert share_over(0.07, earlier, later) == pytest.approx((0.02, 100)), "within a bucket: its upper edge"
    assert share_over(0.05, earlier, later) == pytest.approx((0.10, 100))
    assert share_over(0.05, later, later) is None
    assert share_over(0.05, later, earlier) == (0.0, 100), "a restarted engine begins anew"
    assert share_over(0.05, earlier, {}) is None


@given(
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=60),
    st.lists(st.floats(0.001, 1.0), max_size=60),
    st.sampled_from([0.025, 0.05, 0.1, 0.5]),
)
def test_share_is_that_of_the_new_requests(new: list[float], old: list[float], limit_s: float) -> None:
    edges = (0.025, 0.05, 0.1, 0.5, math.inf)

    def read(times: list[float]) -> Buckets:
        return {edge: float(sum(one <= edge for one in times)) for edge in edges}

    found = share_over(limit_s, read(old), read(old + new))
    assert found is not None
    share, requests = found
    assert requests == len(new)
    assert share == pytest.approx(sum(one > limit_s for one in new) / len(new))
