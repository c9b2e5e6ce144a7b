from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from driftwatch.wire import openai
from driftwatch.wire.exchange import Exchange, Skip

from .conftest import Recorded

REQUEST: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ANSWER: dict[str, Any] = {
    "model": "served",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
}


def chat(request: dict[str, Any] | None = None, answer: object = ANSWER, **changes: Any) -> Exchange:
    values: dict[str, Any] = {
        "id": "r1",
        "path": openai.CHAT,
        "request": json.dumps({**REQUEST, **(request or {})}).encode(),
        "status": 200,
        "headers": {"content-type": "application/json"},
        "response": json.dumps(answer).encode(),
    }
    return Exchange(**{**values, **changes})


def choice(**changes: Any) -> dict[str, Any]:
    return {**ANSWER, "choices": [{**ANSWER["choices"][0], **changes}]}


def stream(*answers: object) -> dict[str, Any]:
    text = "".join(f"data: {json.dumps(answer)}\n\n" for answer in answers) + "data: [DONE]\n\n"
    return {"headers": {"content-type": "text/event-stream; charset=utf-8"}, "response": text.encode()}


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


def test_a_plain_chat_answer() -> None:
    started = datetime(2026, 1, 2, tzinfo=UTC)
    record = openai.record(
        chat(
            {"temperature": 0.5, "top_p": 0.9, "top_k": 40},
            labels={"tenant": "a"},
            session="s",
            started_at=started,
            e2e_s=1.5,
            deployment={"engine": "sglang"},
        )
    )
    assert record.model_dump(exclude_none=True, exclude={"usage"}) == {
        "id": "r1",
        "messages": REQUEST["messages"],
        "output": "hello",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "labels": {"tenant": "a"},
        "ts": started,
        "session": "s",
        "model": "served",
        "finish_reason": "stop",
        "weight": 1.0,
        "cached_tokens": 1,
        "timing": {"e2e_s": 1.5},
        "purpose": "estimate",
        "deployment": {"engine": "sglang"},
    }


def test_sampling_settings_that_were_not_sent_are_unknown() -> None:
    record = openai.record(chat())
    assert (record.temperature, record.top_p, record.top_k) == (None, None, None)


def test_a_streamed_chat_answer_with_reasoning_first() -> None:
    answers = (
        delta(role="assistant", content=""),
        delta(reasoning="let me "),
        delta(reasoning_content="think"),
        delta(content="an"),
        delta(content="swer", finish_reason="length"),
        {"choices": [], "usage": {"completion_tokens": 5}},
    )
    record = openai.record(chat({"stream": True}, ttft_s=0.5, e2e_s=2.5, **stream(*answers)))
    assert record.output == "let me thinkanswer"
    assert record.finish_reason == "length"
    assert record.timing is not None
    assert (record.timing.ttft_s, record.timing.tpot_s) == (0.5, 0.5)


def test_time_per_token_is_unknown_without_the_engines_count() -> None:
    """Two chunks are not two tokens."""
    answers = (delta(content="a"), delta(content="b", finish_reason="stop"))
    record = openai.record(chat(ttft_s=0.5, e2e_s=2.5, **stream(*answers)))
    assert record.timing is not None
    assert record.timing.tpot_s is None


def test_recorded_completion_and_chat(recorded: dict[str, Recorded]) -> None:
    completion = openai.record(recorded["extra_stream_completion"].exchange())
    assert completion.prompt is not None
    assert completion.prompt.startswith("ternal_general_entities")
    assert completion.output is not None
    assert completion.output.startswith("\n    _check_defect")
    plain = openai.record(recorded["extra_nonstream_chat"].exchange())
    assert plain.output is not None
    assert plain.output.startswith("rap_tasks\n    if not")
    assert (plain.temperature, plain.finish_reason) == (0, "length")
    stopped = openai.record(recorded["stop"].exchange())
    assert stopped.output == ", the compiler will be used to the same as the target"


def test_a_compressed_answer_is_read() -> None:
    exchange = chat()
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert openai.record(chat(headers=headers, response=gzip.compress(exchange.response))).output == "hello"


@pytest.mark.parametrize(
    ("exchange", "reason"),
    [
        (chat(complete=False), "aborted"),
        (chat(status=500), "engine_error"),
        (chat(answer={"error": {"message": "x"}}), "engine_error"),
        (chat(answer={"object": "error", "message": "x"}), "engine_error"),
        (chat(**stream(delta(content="a"), {"error": {"message": "died"}})), "engine_error"),
        (chat({"n": 2}), "several_choices"),
        (chat({"use_beam_search": True}), "several_choices"),
        (chat(**stream(delta(content="a"), {"choices": [{"index": 1}]})), "several_choices"),
        (chat(**stream(delta(content="a"))), "incomplete"),
        (chat(answer=choice(finish_reason=None)), "incomplete"),
        (chat(answer=choice(message={"tool_calls": [{"id": "t"}]})), "unsupported"),
        (chat({"tools": [{"type": "function"}]}), "unsupported"),
        (chat({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "unsupported"),
        (chat(path="/v1/responses"), "unsupported"),
        (chat(answer=choice(message={"content": ""})), "no_output"),
        (chat(answer=choice(message={"content": None})), "no_output"),
        (chat(answer=[1]), "malformed"),
        (chat(request={"temperature": "hot"}), "malformed"),
        (chat(response=b"{"), "malformed"),
        (chat(headers={"content-encoding": "br"}), "undecodable"),
        (chat({"prompt": ["a", "b"]}, path=openai.COMPLETIONS), "list_prompt"),
        (chat({"prompt": [[1], [2]]}, path=openai.COMPLETIONS), "list_prompt"),
        (chat({"prompt": [1, 2]}, path=openai.COMPLETIONS), "unsupported"),
        (chat({"prompt": "a", "echo": True}, path=openai.COMPLETIONS), "unsupported"),
    ],
)
def test_skips(exchange: Exchange, reason: str) -> None:
    with pytest.raises(Skip) as skip:
        openai.record(exchange)
    assert skip.value.reason == reason


@pytest.mark.parametrize(
    ("kind", "reason"), [("n2", "several_choices"), ("abort", "incomplete"), ("invalid_400", "engine_error")]
)
def test_skips_recorded(recorded: dict[str, Recorded], kind: str, reason: str) -> None:
    with pytest.raises(Skip) as skip:
        openai.record(recorded[kind].exchange())
    assert skip.value.reason == reason
