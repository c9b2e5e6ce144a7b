from __future__ import annotations

import json
from typing import Any

import pytest

from driftwatch.drift.live import Refused, counts
from driftwatch.wire import openai, vllm
from driftwatch.wire.exchange import Skip

from .conftest import Recorded

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def injected(request: dict[str, Any], path: str = openai.CHAT) -> tuple[dict[str, Any], bool, bool] | None:
    result = vllm.inject(path, json.dumps(request).encode())
    return None if result is None else (json.loads(result.body), result.ids, result.usage)


def test_ids_figures_and_fingerprint_of_a_stream(recorded: dict[str, Recorded]) -> None:
    record = vllm.record(recorded["plain"].exchange(ttft_s=0.1, e2e_s=0.57, deployment={"engine": "vllm"}))
    assert record.prompt_token_ids is not None
    assert record.prompt_token_ids[:5] == [2, 715, 593, 202, 905]
    assert record.output_token_ids is not None
    assert record.output_token_ids[:4] == [86, 202, 905, 1124]
    assert len(record.output_token_ids) == 48
    assert record.engine is not None
    assert record.engine.model_dump(exclude_none=True) == {
        "windows": 13,
        "drafted": 39,
        "accepted": 37,
        "accepted_histogram": [0, 1, 0, 12],
        "accepted_per_window": [1, *[3] * 12],
        "drafted_per_window": [3] * 13,
    }
    assert record.deployment == {"engine": "vllm", "system_fingerprint": "vllm-0.32.0-92e136f8"}
    assert record.timing is not None
    assert record.timing.tpot_s == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("kind", "prompt", "output", "windows"),
    [
        ("extra_nonstream_chat", 55, 48, 18),
        ("extra_stream_completion", 51, 32, 15),
        ("stop", 24, 13, None),
        ("no_usage_requested", 70, 48, None),
    ],
)
def test_ids_of_recorded_answers(
    recorded: dict[str, Recorded], kind: str, prompt: int, output: int, windows: int | None
) -> None:
    record = vllm.record(recorded[kind].exchange())
    assert record.prompt_token_ids is not None
    assert record.output_token_ids is not None
    assert (len(record.prompt_token_ids), len(record.output_token_ids)) == (prompt, output)
    assert (record.engine and record.engine.windows) == windows


def test_without_ids_the_text_and_the_figures_stay(recorded: dict[str, Recorded]) -> None:
    record = vllm.record(recorded["no_token_ids_requested"].exchange())
    assert not record.has_ids
    assert record.output is not None
    assert record.output.startswith(". May also be specified")
    assert record.engine is not None
    assert record.engine.windows == 26


def test_ids_that_are_not_whole_are_not_used(recorded: dict[str, Recorded]) -> None:
    """A parser may swallow events, and their ids with them: the engine's count shows it."""
    plain = recorded["plain"]
    record = vllm.record(
        plain.exchange(response=plain.body.replace(b'"completion_tokens":48', b'"completion_tokens":49'))
    )
    assert not record.has_ids


def test_tool_calls_are_kept_if_ids_say_what_text_cannot(recorded: dict[str, Recorded]) -> None:
    plain = recorded["extra_nonstream_chat"]
    answer = json.loads(plain.body)
    answer["choices"][0]["message"] = {"role": "assistant", "content": None, "tool_calls": [{"id": "t"}]}
    assert vllm.record(plain.exchange(response=json.dumps(answer).encode())).has_ids
    answer["choices"][0]["token_ids"] = None
    with pytest.raises(Skip, match="unsupported"):
        vllm.record(plain.exchange(response=json.dumps(answer).encode()))


@pytest.mark.parametrize(("kind", "reason"), [("n2", "several_choices"), ("abort", "incomplete")])
def test_skips(recorded: dict[str, Recorded], kind: str, reason: str) -> None:
    with pytest.raises(Skip, match=reason):
        vllm.record(recorded[kind].exchange())


def test_injects_ids_into_a_plain_request() -> None:
    assert injected(CHAT) == ({**CHAT, "return_token_ids": True}, True, False)


def test_injects_ids_and_usage_into_a_stream() -> None:
    body = {**CHAT, "stream": True}
    expected = {**body, "return_token_ids": True, "stream_options": {"include_usage": True}}
    assert injected(body) == (expected, True, True)
    assert injected({**body, "stream_options": {"include_usage": False}}) == (expected, True, True)


def test_adds_only_what_is_missing() -> None:
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    assert injected({**CHAT, **asked}) == ({**CHAT, **asked, "return_token_ids": True}, True, False)
    assert injected({**CHAT, "return_token_ids": True}) is None
    assert injected({**CHAT, **asked, "return_token_ids": True}) is None


def test_does_not_turn_on_running_usage() -> None:
    options = {"continuous_usage_stats": True}
    body = {**CHAT, "stream": True, "stream_options": options}
    assert injected(body) == ({**body, "return_token_ids": True}, True, False)


@pytest.mark.parametrize(
    ("path", "request_body"),
    [
        (openai.CHAT, {**CHAT, "n": 2}),
        (openai.COMPLETIONS, {"prompt": ["a", "b"]}),
        # With return_token_ids vLLM no longer echoes the prompt's text.
        (openai.COMPLETIONS, {"prompt": "a", "echo": True}),
    ],
)
def test_leaves_requests_alone_that_give_no_record(path: str, request_body: dict[str, Any]) -> None:
    assert injected(request_body, path) is None


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"n": 123456789012345678901234567890}', b"\xff"])
def test_leaves_bodies_alone_that_it_does_not_understand(body: bytes) -> None:
    assert vllm.inject(openai.CHAT, body) is None


@pytest.mark.parametrize(
    "odd",
    [
        {"acceptance_histogram": {"0": 3}},
        {"num_spec_steps": "43"},
        {"num_accepted_draft_tokens": -1},
        {"per_step_accepted": [[1, 2], [3]]},
        {"num_draft_tokens": 1.5},
    ],
)
def test_figures_of_an_odd_shape_cost_the_record_nothing(recorded: dict[str, Recorded], odd: dict[str, Any]) -> None:
    """They are refused, and control counts the reason; what was served is as good as ever."""
    exchange = recorded["plain"].exchange()
    whole = vllm.record(exchange)
    lines = []
    for line in exchange.response.split(b"\n"):
        if b'"speculative_decoding"' in line:
            event = json.loads(line.removeprefix(b"data: "))
            event["metrics"]["speculative_decoding"] |= odd
            line = b"data: " + json.dumps(event).encode()
        lines.append(line)
    record = vllm.record(recorded["plain"].exchange(response=b"\n".join(lines)))
    assert record.output_token_ids == whole.output_token_ids
    assert record.engine is not None
    assert record.engine.model_dump(exclude_none=True) == {"refused": "malformed"}
    with pytest.raises(Refused, match="malformed"):
        counts(record.engine.model_dump(), 3)
