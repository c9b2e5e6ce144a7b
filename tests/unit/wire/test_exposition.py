"""Engines' own metrics in our words: a recorded vLLM 0.32, and the documented shapes of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from driftwatch.wire import exposition
from driftwatch.wire.exposition import Counter, Series

METRICS = Path(__file__).parents[2] / "data" / "metrics"
TINY = Series("0", "tiny")


def recorded(name: str) -> str:
    return (METRICS / f"{name}.txt").read_text()


def test_a_recorded_runs_counters_are_what_its_requests_add_up_to() -> None:
    known = json.loads((METRICS / "counters.json").read_text())["draft3.T0"]["all_rows"]
    before, after = (exposition.read("vllm", recorded(f"draft3.T0.metrics_{when}")) for when in ("before", "after"))
    risen = {key: value - before.counters[key] for key, value in after.counters.items()}
    expected: dict[tuple[Counter, Series], float] = {
        ("windows", TINY): known["steps"],
        ("drafted_tokens", TINY): known["draft_tokens"],
        ("accepted_tokens", TINY): known["accepted"],
        ("requests", TINY): known["requests"],
        ("output_tokens", TINY): known["output_tokens"],
    }
    for depth, count in enumerate(known["accepted_per_pos"]):
        expected["accepted_at_depth", TINY._replace(depth=str(depth))] = count
    assert risen == expected
    assert after.created == before.created
    assert after.created["windows", TINY] == 1.7959726869632812e09
    assert after.gauges["requests_running", TINY] == 0.0
    assert after.facts == {"kv_cache_dtype": "auto", "speculative_num_draft_tokens": "3"}


def test_an_engine_that_does_not_speculate_says_nothing_of_it() -> None:
    found = exposition.read("vllm", recorded("baseline.T0.metrics_after"))
    assert {name for name, _ in found.counters} == {"requests", "output_tokens"}


def test_underscores_for_colons_and_a_missing_engine_label() -> None:
    text = 'vllm_spec_decode_num_drafts_total{model_name="m"} 5.0\nvllm_gpu_cache_usage_perc{model_name="m"} 0.5\n'
    found = exposition.read("vllm", text)
    assert found.counters == {("windows", Series("0", "m")): 5.0}
    assert found.gauges == {("kv_cache_usage_ratio", Series("0", "m")): 0.5}


SGLANG = """# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 2.6375
sglang:spec_accept_length{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="1"} 9.0
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 3.0
sglang:spec_num_draft_tokens{engine_type="unified",model_name="m",tp_rank="0"} 4.0
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{engine_type="unified",is_streaming="true",model_name="m",tenant="acme"} 48210.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="false",model_name="m",tenant=""} 790.0
sglang:spec_verify_calls_total{engine_type="unified",model_name="m",tenant="acme"} 18772.0
sglang:num_requests_total{engine_type="unified",model_name="m"} 100.0
"""


def test_sglang() -> None:
    found = exposition.read("sglang", SGLANG)
    m = Series("0", "m")
    assert found.counters == {("windows", m): 18772.0, ("output_tokens", m): 49000.0, ("requests", m): 100.0}
    assert found.gauges == {("acceptance_length", m): 2.6375, ("requests_running", m): 3.0}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('tp_rank="0"} 2.6375', 'tp_rank="0"} 0.0'),
        ('tp_rank="0"} 3.0', 'tp_rank="0"} 0.0'),
        ('engine_type="unified",model_name="m",moe', 'engine_type="prefill",model_name="m",moe'),
    ],
    ids=["not speculating", "idle", "prefill worker"],
)
def test_a_gauge_that_says_nothing_is_absent(old: str, new: str) -> None:
    found = exposition.read("sglang", SGLANG.replace(old, new))
    assert "acceptance_length" not in {name for name, _ in found.gauges}


def test_sglangs_counter_of_windows_at_zero_is_no_speculation() -> None:
    found = exposition.read("sglang", SGLANG.replace("18772.0", "0.0"))
    assert "windows" not in {name for name, _ in found.counters}


TRTLLM = """trtllm_spec_decode_num_draft_tokens_total{model_name="m",engine_type="pytorch"} 999.0
trtllm_spec_decode_acceptance_length{model_name="m",engine_type="pytorch"} 0.0
trtllm_spec_decode_drafted_tokens_total{model_name="m",engine_type="pytorch",token_position="0"} 10.0
trtllm_spec_decode_drafted_tokens_total{model_name="m",engine_type="pytorch",token_position="1"} 9.0
trtllm_spec_decode_accepted_tokens_total{model_name="m",engine_type="pytorch",token_position="0"} 7.0
trtllm_spec_decode_accepted_tokens_total{model_name="m",engine_type="pytorch",token_position="1"} 4.0
trtllm_request_success_total{model_name="m",engine_type="pytorch",finished_reason="stop"} 2.0
trtllm_generation_tokens_total{model_name="m",engine_type="pytorch"} 40.0
trtllm_num_requests_running{model_name="m",engine_type="pytorch"} 1.0
"""


def test_tensorrt_llm() -> None:
    found = exposition.read("trtllm", TRTLLM)
    m = Series("0", "m")
    assert found.counters == {
        ("windows", m): 10.0,
        ("drafted_tokens", m): 19.0,
        ("accepted_tokens", m): 11.0,
        ("accepted_at_depth", m._replace(depth="0")): 7.0,
        ("accepted_at_depth", m._replace(depth="1")): 4.0,
        ("requests", m): 2.0,
        ("output_tokens", m): 40.0,
    }
    assert found.gauges == {("requests_running", m): 1.0}


def test_drained_iterations() -> None:
    stats = {"numDraftTokens": 12, "numAcceptedTokens": 5, "numRequestsWithDraftTokens": 4, "acceptanceLength": 2.25}
    none = {"numDraftTokens": 0, "numAcceptedTokens": 0, "acceptanceLength": 0.0}
    iterations = [{"iter": 1, "specDecodingStats": stats}, {"iter": 2, "specDecodingStats": none}, {"iter": 3}, 4]
    m = Series("0", "")
    assert exposition.read_iterations(iterations * 2) == {
        ("windows", m): 8.0,
        ("drafted_tokens", m): 24.0,
        ("accepted_tokens", m): 10.0,
    }
    assert exposition.read_iterations({"detail": "x"}) == {}


def test_what_is_not_understood_is_left_out() -> None:
    text = '# HELP x\nvllm:spec_decode_num_drafts_total{engine="0"} nonsense\nother{a="b"} 1\nvllm:x_total 1.0 2 3\n'
    assert exposition.read("vllm", text).counters == {}
    escaped = 'vllm:generation_tokens_total{engine="0",model_name="a\\"b,c=\\"d"} 2.0\n'
    assert list(exposition.read("vllm", escaped).counters) == [("output_tokens", Series("0", 'a\\"b,c=\\"d'))]


def dp_page(schedulers: list[tuple[int, int, float]]) -> str:
    """An SGLang with attention data parallelism: ``dp_rank``, ``tp_rank`` and running requests of each scheduler."""
    text = 'sglang:num_running_reqs{{dp_rank="{}",engine_type="unified",model_name="m",pp_rank="0",tp_rank="{}"}} {}\n'
    calls = 'sglang:spec_verify_calls_total{{dp_rank="{}",model_name="m",tp_rank="{}"}} {}\n'
    return "".join(text.format(*one) + calls.format(*one) for one in schedulers)


def test_data_parallel_ranks_add_up_wherever_they_run() -> None:
    """Rank n speaks from the first tensor-parallel rank of its group, which is 0 for the first group alone."""
    found = exposition.read("sglang", dp_page([(0, 0, 3.0), (1, 2, 4.0)]))
    assert sum(value for (name, _), value in found.gauges.items() if name == "requests_running") == 7.0
    assert sum(value for (name, _), value in found.counters.items() if name == "windows") == 7.0
    assert {series.engine for _, series in found.gauges} == {"0", "1"}


def test_ranks_of_one_group_say_the_same_once() -> None:
    """``--enable-metrics-for-all-schedulers``: each rank of a group states its figures, in any order."""
    found = exposition.read("sglang", dp_page([(0, 1, 99.0), (0, 0, 3.0), (1, 3, 98.0), (1, 2, 4.0)]))
    assert sorted(value for (name, _), value in found.gauges.items() if name == "requests_running") == [3.0, 4.0]
    assert sum(value for (name, _), value in found.counters.items() if name == "windows") == 7.0
