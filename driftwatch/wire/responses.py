"""``/v1/responses``: text only. vLLM 0.33 gives neither token ids nor figures there.

A stream is ``event:`` lines with one object each; the last one, ``response.completed`` or ``response.incomplete``,
repeats the whole answer. What a request continues from the server's memory is not on the wire: ``unsupported``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from driftwatch.records import Record
from driftwatch.wire import openai
from driftwatch.wire.exchange import Exchange, Skip

RESPONSES = "/v1/responses"

Json = dict[str, Any]


def record(exchange: Exchange) -> Record:
    """The record of an exchange. Raises Skip."""
    request, answers = openai.read(exchange, _check)
    answer = _final(answers)
    usage: Json = answer["usage"] if isinstance(answer.get("usage"), dict) else {}
    tokens = usage.get("output_tokens")
    cached = usage.get("input_tokens_details")
    return openai.build(
        {
            "id": exchange.id,
            "messages": _messages(request),
            "output": "".join(_output(answer)),
            **{key: request.get(key) for key in ("temperature", "top_p", "top_k")},
            "labels": dict(exchange.labels),
            "ts": exchange.started_at,
            "session": exchange.session,
            "model": answer.get("model") or request.get("model"),
            "finish_reason": "length" if answer["status"] == "incomplete" else "stop",
            "cached_tokens": cached.get("cached_tokens") if isinstance(cached, dict) else None,
            "timing": openai.timing(exchange, tokens),
            "deployment": dict(exchange.deployment),
            "usage": {"completion_tokens": tokens, "prompt_tokens": usage.get("input_tokens")},
        }
    )


def _check(_: str, request: Json) -> None:
    # Tools are part of the rendered prompt, and their calls are no text.
    if any(request.get(key) for key in ("previous_response_id", "conversation", "prompt", "tools", "background")):
        raise Skip("unsupported")


def _final(answers: list[Json]) -> Json:
    """The whole answer, out of a plain one or of a stream's last event."""
    for answer in reversed(answers):
        if answer.get("type") in ("error", "response.failed"):
            raise Skip("engine_error")
        inner = answer.get("response")
        found = inner if isinstance(inner, dict) else answer
        if found.get("status") == "failed":
            raise Skip("engine_error")
        if found.get("status") == "cancelled":
            raise Skip("aborted")
        if found.get("status") in ("completed", "incomplete") and isinstance(found.get("output"), list):
            return found
    raise Skip("incomplete")


def _output(answer: Json) -> Iterator[str]:
    for item in answer["output"]:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind not in ("message", "reasoning"):
            raise Skip("unsupported")  # calls of functions and tools
        for part in item.get("content") or []:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield part["text"]


def _messages(request: Json) -> list[Json]:
    messages: list[Json] = []
    if isinstance(request.get("instructions"), str):
        messages.append({"role": "system", "content": request["instructions"]})
    given = request.get("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise Skip("malformed")
    for item in given:
        if not isinstance(item, dict) or item.get("type", "message") != "message" or not item.get("role"):
            raise Skip("unsupported")
        messages.append({"role": item["role"], "content": _text(item.get("content"))})
    return messages


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Skip("malformed")
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("input_text", "output_text", "text"):
            raise Skip("unsupported")
        parts.append(str(part.get("text", "")))
    return "".join(parts)
