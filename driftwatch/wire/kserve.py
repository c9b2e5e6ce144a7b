"""KServe's inference logger: CloudEvents, one for the request and one for the answer, under the same id.

``type`` is ``org.kubeflow.serving.inference.request`` or ``.response``. The data of an answer may be JSON, or the whole
text of a stream. Which engine spoke is not said: it shows in what the answer holds.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import orjson

from driftwatch.records import Record
from driftwatch.wire import dialects, openai, responses, sglang
from driftwatch.wire.exchange import Exchange, Skip

PREFIX = "org.kubeflow.serving.inference."
KINDS = ("request", "response")

Json = dict[str, Any]


def is_event(line: Json) -> bool:
    """Whether this is an event of the logger."""
    kind = line.get("type")
    return "specversion" in line and isinstance(kind, str) and kind.startswith(PREFIX)


@dataclass
class Joiner:
    """Pairs requests and answers, whichever comes first."""

    waiting: dict[tuple[str, str], Json] = field(default_factory=dict)

    def take(self, event: Json) -> Record | None:
        """The record of the pair that this event completes; None while the other half is missing. Raises Skip."""
        kind, id = str(event["type"]).removeprefix(PREFIX), str(event.get("id") or "")
        if kind not in KINDS or not id:
            raise Skip("malformed")
        other = self.waiting.pop((KINDS[1 - KINDS.index(kind)], id), None)
        if other is None:
            self.waiting[kind, id] = event
            return None
        request, answer = (event, other) if kind == "request" else (other, event)
        return _record(id, request, answer)


def _record(id: str, request: Json, answer: Json) -> Record:
    body, data = _data(request), _data(answer)
    streamed = data.lstrip().startswith((b"data:", b"event:", b":"))
    name = request.get("inferenceservicename") or answer.get("inferenceservicename")
    exchange = Exchange(
        id=id,
        path=_path(body),
        request=body,
        status=200,
        headers={"content-type": "text/event-stream" if streamed else "application/json"},
        response=data,
        labels={"inferenceservice": str(name)} if name else {},
        started_at=_time(request.get("time")),
    )
    if exchange.path == responses.RESPONSES:
        return responses.record(exchange)
    if exchange.path == sglang.GENERATE or b'"sglext"' in data:
        return sglang.record(exchange)
    vllm = b'"token_ids"' in data or b'"speculative_decoding"' in data
    return dialects.of("vllm" if vllm else "openai").read(exchange)


def _path(body: bytes) -> str:
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise Skip("malformed") from None
    fields = request.keys() if isinstance(request, dict) else ()
    for key, path in (
        ("messages", openai.CHAT),
        ("prompt", openai.COMPLETIONS),
        ("input", responses.RESPONSES),
        ("sampling_params", sglang.GENERATE),
    ):
        if key in fields:
            return path
    raise Skip("unsupported")


def _data(event: Json) -> bytes:
    if isinstance(encoded := event.get("data_base64"), str):
        try:
            return base64.b64decode(encoded, validate=True)
        except binascii.Error:
            raise Skip("malformed") from None
    data = event.get("data")
    return data.encode() if isinstance(data, str) else orjson.dumps(data)


def _time(value: object) -> datetime | None:
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return found if found is not None and found.tzinfo is not None else None
