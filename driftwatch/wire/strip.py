"""Takes out of an answer what only the tap asked for, so that the client gets what it would have got without.

As vLLM 0.32 does it: without ``return_token_ids`` the fields are there and null; a usage event carries the
``system_fingerprint`` that otherwise the last content event has; ids force events with an empty delta.
As SGLang 0.5.23 does it: fields that nobody asked for are not there at all; ``sglext`` comes in an event of its own.
"""

from __future__ import annotations

from typing import Any, Protocol

import orjson

from driftwatch.wire import sse
from driftwatch.wire.injection import Injected

LARGEST = 16 * 1024 * 1024
"""More bytes than this are not held back for one event or one JSON answer; the rest then passes as it is."""


class Stripper(Protocol):
    """Fed with the engine's bytes; gives the client's. Neither method loses content or raises."""

    def feed(self, data: bytes) -> bytes: ...

    def close(self) -> bytes:
        """What is still held back, at the end of the answer or where it broke off."""


def stripper(injected: Injected, media_type: str) -> Stripper | None:
    """The stripper for an answer of this media type; None if it can hold nothing to strip."""
    if media_type == "text/event-stream":
        return EventStripper(injected)
    if media_type == "application/json":
        return JsonStripper(injected)
    return None


class JsonStripper:
    """Strips a plain JSON answer, which is held back until it is whole."""

    def __init__(self, injected: Injected) -> None:
        self._injected = injected
        self._held = bytearray()
        self._open = True

    def feed(self, data: bytes) -> bytes:
        if not self._open:
            return data
        self._held += data
        if len(self._held) <= LARGEST:
            return b""
        self._open = False
        return self._take()

    def close(self) -> bytes:
        body = self._take()
        if not self._open:
            return body
        try:
            answer = orjson.loads(body)
            return orjson.dumps(answer) if _clean(answer, self._injected) else body
        except (orjson.JSONDecodeError, TypeError):
            return body

    def _take(self) -> bytes:
        held = bytes(self._held)
        self._held.clear()
        return held


class EventStripper:
    """Strips a stream, event by event. Only a last content event waits: for the event behind it."""

    def __init__(self, injected: Injected) -> None:
        self._injected = injected
        self._parser = sse.Parser()
        self._last: tuple[sse.Event, dict[str, Any]] | None = None
        self._usage_everywhere = False
        self._open = True

    def feed(self, data: bytes) -> bytes:
        if not self._open:
            return data
        out = b"".join([self._event(event) for event in self._parser.feed(data)])
        if len(self._parser) > LARGEST:
            self._open = False
            out += self._release() + self._parser.rest
        return out

    def close(self) -> bytes:
        return self._release() + (self._parser.rest if self._open else b"")

    def _event(self, event: sse.Event) -> bytes:
        try:
            answer = orjson.loads(event.data) if event.data is not None else None
        except orjson.JSONDecodeError:
            answer = None  # [DONE], or nothing that the tap understands
        if isinstance(answer, dict) and _drop(answer, self._injected):
            if _only_extensions(answer):
                return self._release()
            event = _with_data(event, answer)
        if not isinstance(answer, dict) or not isinstance(choices := answer.get("choices"), list):
            return self._release() + event.raw
        usage = answer.get("usage") is not None
        if self._injected.usage and usage and not choices and not self._usage_everywhere:
            return self._release(answer.get("system_fingerprint"))
        # --enable-force-include-usage: the client would have got the usage event too, so it stays.
        self._usage_everywhere |= usage
        if self._injected.ids and _remove_ids(answer):
            if _is_empty(choices):
                return self._release()
            event = _with_data(event, answer)
        out = self._release()
        if self._injected.usage and any(isinstance(one, dict) and one.get("finish_reason") for one in choices):
            self._last = event, answer
            return out
        return out + event.raw

    def _release(self, fingerprint: object = None) -> bytes:
        """The event held back, with the fingerprint that it carries when no usage event follows."""
        if self._last is None:
            return b""
        event, answer = self._last
        self._last = None
        if fingerprint is not None and "system_fingerprint" not in answer:
            event = _with_data(event, {**answer, "system_fingerprint": fingerprint})
        return event.raw


def _clean(answer: Any, injected: Injected) -> bool:
    """Strip a whole answer. True if there was anything to strip."""
    dropped = _drop(answer, injected)
    return (injected.ids and _remove_ids(answer)) or dropped


def _drop(answer: Any, injected: Injected) -> bool:
    """Remove the keys that are there only since they were asked for. True if there were any."""
    if not isinstance(answer, dict):
        return False
    found = False
    choices = answer.get("choices")
    if injected.dropped:
        for holder in [answer, *(choices if isinstance(choices, list) else [])]:
            for key in injected.dropped & holder.keys() if isinstance(holder, dict) else ():
                del holder[key]
                found = True
    extensions = answer.get("sglext")
    if injected.sglext and isinstance(extensions, dict):
        for key in injected.sglext & extensions.keys():
            del extensions[key]
            found = True
        if found and not extensions:
            del answer["sglext"]
    return found


def _only_extensions(answer: dict[str, Any]) -> bool:
    """Whether a stripped event was there for ``sglext`` alone."""
    return answer.get("choices") == [] and "sglext" not in answer and answer.get("usage") is None


def _remove_ids(answer: Any) -> bool:
    """Make the ids null, as they are when nobody asks. True if there were any."""
    found = False
    choices = answer.get("choices") if isinstance(answer, dict) else None
    for holder in [answer, *(choices if isinstance(choices, list) else [])]:
        for key in ("prompt_token_ids", "token_ids"):
            if isinstance(holder, dict) and isinstance(holder.get(key), list):
                holder[key] = None
                found = True
    return found


def _is_empty(choices: list[Any]) -> bool:
    """Whether a chat event exists only for its ids: no text, no role, no end, no log probabilities."""
    return bool(choices) and all(
        isinstance(choice, dict)
        and isinstance(choice.get("delta"), dict)
        and not any(value is not None for value in choice["delta"].values())
        and choice.get("finish_reason") is None
        and choice.get("logprobs") is None
        for choice in choices
    )


def _with_data(event: sse.Event, answer: dict[str, Any]) -> sse.Event:
    data = orjson.dumps(answer)
    if event.data is not None and event.raw.count(event.data) == 1:
        return sse.Event(event.raw.replace(event.data, data), data, event.name)
    name = b"event: " + event.name + b"\n" if event.name else b""  # data over several lines
    return sse.Event(name + b"data: " + data + b"\n\n", data, event.name)
