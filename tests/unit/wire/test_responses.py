"""``/v1/responses`` in the shapes of vLLM 0.33: plain and as a stream of named events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from driftwatch.wire import dialects
from driftwatch.wire.exchange import Exchange, Skip

REQUEST: dict[str, Any] = {"model": "m", "input": "hi", "temperature": 0.5}
MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hello"}]}
REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "let me think. "}]}
ANSWER: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "model": "served",
    "status": "completed",
    "output": [REASONING, MESSAGE],
    "usage": {"input_tokens": 3, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 1}},
}


def exchange(request: dict[str, Any], body: bytes, kind: str = "application/json", **changes: Any) -> Exchange:
    values: dict[str, Any] = {
        "id": "r1",
        "path": "/v1/responses",
        "request": json.dumps(REQUEST | request).encode(),
        "status": 200,
        "headers": {"content-type": kind},
        "response": body,
        "deployment": {"engine": "vllm"},
    }
    return Exchange(**values | changes)


def plain(request: dict[str, Any] | None = None, **answer: Any) -> Exchange:
    return exchange(request or {}, json.dumps(ANSWER | answer).encode())


def stream(*events: dict[str, Any], **changes: Any) -> Exchange:
    text = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    return exchange({"stream": True}, b": keep-alive\n\n" + text.encode(), "text/event-stream", **changes)


DELTA = {"type": "response.output_text.delta", "delta": "hel"}


def test_a_plain_answer() -> None:
    record = dialects.record(plain({"instructions": "be brief"}))
    assert record.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert record.output == "let me think. hello"
    assert (record.model, record.temperature, record.finish_reason, record.cached_tokens) == ("served", 0.5, "stop", 1)
    assert (record.engine, record.has_ids) == (None, False)


def test_a_stream_is_its_last_event() -> None:
    events = (
        {"type": "response.created", "response": ANSWER | {"status": "in_progress", "output": []}},
        DELTA,
        {"type": "response.completed", "response": ANSWER},
    )
    record = dialects.record(stream(*events, ttft_s=0.2, e2e_s=1.0))
    assert record.output == "let me think. hello"
    assert record.timing is not None
    assert record.timing.tpot_s == pytest.approx(0.2)


def test_an_answer_that_was_cut_and_a_conversation_given_in_full() -> None:
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"role": "user", "content": "c"},
    ]
    record = dialects.record(plain({"input": given}, status="incomplete"))
    assert record.finish_reason == "length"
    assert record.messages == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]


CALL = {"type": "function_call", "name": "f", "arguments": "{}"}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}


@pytest.mark.parametrize(
    ("exchange", "reason"),
    [
        (plain({"previous_response_id": "resp_0"}), "unsupported"),
        (plain({"tools": [{"type": "function"}]}), "unsupported"),
        (plain({"background": True}), "unsupported"),
        (plain({"input": [IMAGE]}), "unsupported"),
        (plain({"input": [CALL]}), "unsupported"),
        (plain({"input": 3}), "malformed"),
        (plain(output=[CALL]), "unsupported"),
        (plain(output=[]), "no_output"),
        (plain(status="failed", error={"code": "x"}), "engine_error"),
        (plain(status="cancelled"), "aborted"),
        (plain(status="queued"), "incomplete"),
        (stream(DELTA), "incomplete"),
        (stream(DELTA, {"type": "error", "message": "died"}), "engine_error"),
        (stream(DELTA, {"type": "response.failed", "response": {"status": "failed"}}), "engine_error"),
        (stream(DELTA, complete=False), "aborted"),
        (exchange({}, b"{}", status=404), "engine_error"),
    ],
)
def test_skips(exchange: Exchange, reason: str) -> None:
    with pytest.raises(Skip) as skip:
        dialects.record(exchange)
    assert skip.value.reason == reason
