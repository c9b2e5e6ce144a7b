"""What becomes of each recorded kind of exchange, in each dialect: a record, or a reason from the closed list."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from driftwatch.settings import EngineKind
from driftwatch.wire import dialects, openai
from driftwatch.wire.exchange import SKIP_REASONS, Exchange, Skip

from .conftest import Recorded

ENDS = {
    "plain": "ids",
    "plain_ignore_eos": "ids",
    "multi_turn": "ids",
    "stop": "ids",
    "logprobs5": "ids",
    "no_usage_requested": "ids",
    "no_token_ids_requested": "text",
    "extra_nonstream_chat": "ids",
    "extra_stream_completion": "ids",
    "n2": "several_choices",
    "abort": "incomplete",
    "invalid_400": "engine_error",
}


def end_of(exchange: Exchange) -> str:
    try:
        return "ids" if dialects.record(exchange).has_ids else "text"
    except Skip as skip:
        return skip.reason if skip.reason in SKIP_REASONS else "a reason that is not listed"


@pytest.mark.parametrize("kind", ENDS)
def test_recorded_kinds(recorded: dict[str, Recorded], kind: str) -> None:
    assert end_of(recorded[kind].exchange(deployment={"engine": "vllm"})) == ENDS[kind]
    wanted = ENDS[kind].replace("ids", "text")
    if recorded[kind].path == openai.CHAT:
        assert end_of(recorded[kind].exchange()) == wanted, "any other server: text, made into tokens again"


def test_every_recorded_kind_has_its_end(recorded: dict[str, Recorded]) -> None:
    assert set(recorded) == set(ENDS)


def test_every_engine_kind_has_a_dialect() -> None:
    assert set(dialects.DIALECTS) == set(get_args(EngineKind)) - {"auto"}
    assert dialects.of("auto") is dialects.of("openai") is dialects.of(None)
    assert "/generate" in dialects.of("sglang").routes


def test_figures_are_there_when_the_engine_ended_the_request(recorded: dict[str, Recorded]) -> None:
    """vLLM 0.32 gives none for stop strings and aborts: what is missing is not missing at random."""
    with_figures = set()
    for kind, end in ENDS.items():
        if end in ("ids", "text"):
            record = dialects.record(recorded[kind].exchange(deployment={"engine": "vllm"}))
            with_figures |= {kind} if record.engine is not None else set()
    assert set(ENDS) - with_figures == {"stop", "no_usage_requested", "n2", "abort", "invalid_400"}


def streamed(*events: str, **request: Any) -> Exchange:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True} | request
    data = "".join(events).encode()
    return Exchange("r", openai.CHAT, json.dumps(body).encode(), 200, {"content-type": "text/event-stream"}, data)


def delta(finish: str | None = None, **fields: Any) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': fields, 'finish_reason': finish}]})}\n\n"


def test_comments_named_events_and_foreign_line_ends_are_read() -> None:
    events = [": keep-alive\n\n", delta(content="he"), "event: message\n" + delta(content="llo", finish="stop")]
    for text in ("".join(events), "".join(events).replace("\n", "\r\n"), "".join(events).replace("\n", "\r")):
        assert dialects.record(streamed(text, "data: [DONE]\n\n")).output == "hello"


@pytest.mark.parametrize(
    ("exchange", "end"),
    [
        (streamed(delta(content="a"), 'data: {"error": {"message": "died"}}\n\n', "data: [DONE]\n\n"), "engine_error"),
        (streamed(delta(content="a"), 'event: error\ndata: {"error": "x"}\n\n'), "engine_error"),
        (streamed(delta(content="a"), "data: {broken\n\n"), "malformed"),
        (streamed(delta(tool_calls=[{"index": 0}]), delta(finish="tool_calls")), "unsupported"),
        (streamed(delta(reasoning="think"), delta(content="a", finish="stop")), "text"),
        (streamed(delta(content="a", finish="abort")), "aborted"),
        (streamed(delta(content="a")), "incomplete"),
        (streamed(": keep-alive\n\n"), "incomplete"),
        (streamed(delta(content="a", finish="stop"), n=3), "several_choices"),
    ],
)
def test_ends_of_streams(exchange: Exchange, end: str) -> None:
    assert end_of(exchange) == end
