"""TensorRT-LLM's answers in the shapes of its 2026 main branch."""

from __future__ import annotations

import json
from typing import Any

import pytest

from driftwatch.wire import dialects, openai, trtllm
from driftwatch.wire.exchange import Exchange, Skip

FACTS = {"engine": "trtllm", "version": "1.3.0"}
STATS = {
    "acceptance_rate": 0.5,
    "total_accepted_draft_tokens": 6,
    "total_draft_tokens": 12,
    "num_spec_steps": 4,
    "acceptance_histogram": [1, 1, 1, 1],
    "num_spec_tokens": 3,
}


def exchange(choice: dict[str, Any], path: str = openai.CHAT, **request: Any) -> Exchange:
    base: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    if path == openai.COMPLETIONS:
        base = {"model": "m", "prompt": "a"}
    message = {"text": "x"} if path == openai.COMPLETIONS else {"message": {"role": "assistant", "content": "x"}}
    answer = {
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop"} | message | choice],
        "usage": {"prompt_tokens": 2, "completion_tokens": 11},
        "prompt_token_ids": [1, 2],
    }
    return Exchange(
        "r1",
        path,
        json.dumps(base | request).encode(),
        200,
        {"content-type": "application/json"},
        json.dumps(answer).encode(),
        deployment=FACTS,
    )


def engine(choice: dict[str, Any]) -> dict[str, Any] | None:
    found = dialects.record(exchange(choice)).engine
    return found.model_dump(exclude_none=True) if found else None


def test_counts_on_the_choice() -> None:
    expected = {"windows": 4, "drafted": 12, "accepted": 6, "accepted_histogram": [1, 1, 1, 1], "gamma": 3}
    assert engine({"speculative_decoding": STATS, "avg_decoded_tokens_per_iter": 2.2}) == expected


def test_tokens_per_step_give_windows_and_accepted() -> None:
    """Eleven tokens, ten behind the first, at 2.5 a step: four windows."""
    assert engine({"avg_decoded_tokens_per_iter": 2.5}) == {"windows": 4, "accepted": 6}


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"avg_decoded_tokens_per_iter": None},
        {"avg_decoded_tokens_per_iter": 1.0},
        {"avg_decoded_tokens_per_iter": 90.0},
        {"speculative_decoding": {"total_draft_tokens": 0, "total_accepted_draft_tokens": 0, "num_spec_steps": 0}},
    ],
)
def test_what_says_nothing_is_unknown(choice: dict[str, Any]) -> None:
    assert engine(choice) is None


def test_nothing_is_asked_for() -> None:
    assert dialects.of("trtllm").inject is None


def test_ids_of_completions_and_the_conversation() -> None:
    record = trtllm.record(
        exchange({"token_ids": list(range(11))}, openai.COMPLETIONS, conversation_params={"conversation_id": "c"})
    )
    assert (record.prompt_token_ids, record.session) == ([1, 2], "c")
    assert record.output_token_ids is not None
    assert len(record.output_token_ids) == 11


def test_perf_metrics_behind_the_end_of_a_stream_do_no_harm() -> None:
    body = (
        b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        b'event: trtllm.perf_metrics\ndata: {"timing": 1}\n\n'
    )
    streamed = Exchange(
        "r", openai.CHAT, b'{"messages": []}', 200, {"content-type": "text/event-stream"}, body, deployment=FACTS
    )
    assert trtllm.record(streamed).output == "x"


def test_tool_calls_without_ids_are_unsupported() -> None:
    with pytest.raises(Skip, match="unsupported"):
        trtllm.record(exchange({"message": {"tool_calls": [{"id": "t"}]}}))
