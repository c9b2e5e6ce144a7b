"""Takes out of an answer what only the tap asked for, so that the client gets what it would have got without.

As vLLM 0.32 does it: without ``return_token_ids`` the fields are there and null; a usage event carries the
``system_fingerprint`` that otherwise the last content event has; ids force events with an empty delta.
As SGLang 0.5.23 does it: fields that nobody asked for are not there at all; ``sglext`` comes in an event of its own.

Whole events are cut out, and members out of the others (``surgery``): every byte that stays is the engine's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Protocol

import orjson

from driftwatch.wire import sse
from driftwatch.wire.injection import Injected
from driftwatch.wire.surgery import Surgeon

SMALL = 64 * 1024
LARGEST = 1024 * 1024
"""A larger event passes in pieces: what is in it is taken out all the same, but it is not judged as a whole."""

IDS = frozenset({b"prompt_token_ids", b"token_ids"})
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_FLAT = re.compile(rb'(token_ids"\s*:\s*)\[[\d\s,]*\]')


class Stripper(Protocol):
    """Fed with the engine's bytes; gives the client's, never more of them. Neither method loses content or raises."""

    def feed(self, data: bytes) -> bytes: ...

    def close(self) -> bytes:
        """What is still held back, at the end of the answer or where it broke off."""


def stripper(injected: Injected, media_type: str, room: Callable[[int], bool]) -> Stripper | None:
    """The stripper for an answer of this media type; None if it can hold nothing to strip.

    ``room`` is asked before more than a piece is held back; where there is none, it passes in pieces.
    """
    if media_type == "text/event-stream":
        return EventStripper(injected, room)
    if media_type == "application/json":
        return surgeon(injected)
    return None


def surgeon(injected: Injected) -> Surgeon:
    """Takes out of a whole answer, or of the data of an event, what was asked for."""
    return Surgeon(
        IDS if injected.ids else frozenset(),
        frozenset(name.encode() for name in injected.dropped),
        frozenset(name.encode() for name in injected.sglext),
    )


class EventStripper:
    """Strips a stream, event by event. Only a last content event waits: for the event behind it."""

    def __init__(self, injected: Injected, room: Callable[[int], bool]) -> None:
        self._injected = injected
        self._room = room
        self._granted = SMALL
        names = (["token_ids"] if injected.ids else []) + ["sglext", "usage"] + sorted(injected.dropped)
        self._marks = [f'{name}"'.encode() for name in names]
        self._parser = sse.Parser()
        self._last: tuple[sse.Event, dict[str, Any]] | None = None
        self._usage_everywhere = False
        self._passing: Surgeon | None = None
        """Works on the present event, which is too large to be held back."""

    def feed(self, data: bytes) -> bytes:
        if self._last is None and self._passing is None and not self._parser and self._plain(data):
            return data
        out = []
        if self._passing is not None:
            here, behind = self._parser.through(data)
            out.append(self._passing.feed(here))
            if behind is None:
                return out[0]
            out.append(self._passing.close())
            self._passing, data = None, behind
        out += map(self._event, self._parser.feed(data))
        while len(self._parser) > self._granted:
            if self._granted >= LARGEST or not self._room(SMALL):
                self._passing = surgeon(self._injected)
                out += [self._release(), self._passing.feed(self._parser.let_go())]
                break
            self._granted += SMALL
        return b"".join(out)

    def close(self) -> bytes:
        passing = self._passing.close() if self._passing is not None else b""
        return self._release() + passing + self._unfinished()

    def _unfinished(self) -> bytes:
        """An event that broke off, as far as it came, without what was asked for."""
        rest = self._parser.rest
        if (self._injected.usage or self._injected.sglext) and _NO_CHOICES.search(rest):
            return b""
        operation = surgeon(self._injected)
        return operation.feed(rest) + operation.close()

    def _plain(self, data: bytes) -> bool:
        """Whether these are whole events, and hold nothing that was asked for, nor the end of a choice."""
        return (
            data.endswith(b"\n\n")
            and not any(mark in data for mark in self._marks)
            and data.count(b'"finish_reason"') == data.count(b'"finish_reason":null')
        )

    def _event(self, event: sse.Event) -> bytes:
        injected = self._injected
        answer = _read(event.data)
        if not isinstance(answer, dict):
            return self._release() + event.raw  # [DONE], or nothing that the tap understands
        if (injected.sglext or injected.dropped) and _drop(answer, injected):
            if _only_extensions(answer):
                return self._release()
            event = _operated(event, injected)
        choices = answer.get("choices")
        if not isinstance(choices, list):
            return self._release() + self._without_ids(event, answer).raw
        usage = answer.get("usage") is not None
        if injected.usage and usage and not choices and not self._usage_everywhere:
            return self._release(answer.get("system_fingerprint"))
        # --enable-force-include-usage: the client would have got the usage event too, so it stays.
        self._usage_everywhere |= usage
        event = self._without_ids(event, answer)
        out = self._release()
        if not event.raw:
            return out
        if injected.usage and any(isinstance(one, dict) and one.get("finish_reason") for one in choices):
            self._last = event, answer
            return out
        return out + event.raw

    def _without_ids(self, event: sse.Event, answer: dict[str, Any]) -> sse.Event:
        """The event with its ids made null; empty if it was there for them alone."""
        if not self._injected.ids or not (found := _remove_ids(answer)):
            return event
        choices = answer.get("choices")
        if isinstance(choices, list) and _is_empty(choices):
            return sse.Event(b"", None)
        # As many keys as there are such values: then none lies elsewhere, and the brackets need not be followed.
        keys = list(_FLAT.finditer(event.raw))
        if len(keys) != found:
            return _operated(event, self._injected)
        raw = event.raw
        for key in reversed(keys):
            raw = raw[: key.end(1)] + b"null" + raw[key.end() :]
        return sse.Event(raw, None, event.name)

    def _release(self, fingerprint: object = None) -> bytes:
        """The event held back, with the fingerprint that it carries when no usage event follows."""
        if self._last is None:
            return b""
        event, answer = self._last
        self._last = None
        if fingerprint is not None and "system_fingerprint" not in answer:
            end = event.raw.rindex(b"}")
            return event.raw[:end] + b',"system_fingerprint":' + json.dumps(fingerprint).encode() + event.raw[end:]
        return event.raw


def _read(data: bytes | None) -> Any:
    """The JSON of an event, read as leniently as anybody does; None if it is none."""
    if data is None:
        return None
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(data)  # NaN, and surrogates that stand alone
    except (ValueError, RecursionError):
        return None


def _operated(event: sse.Event, injected: Injected) -> sse.Event:
    operation, data = surgeon(injected), event.data or b""
    left = operation.feed(data) + operation.close()
    if event.raw.count(data) == 1:
        return sse.Event(event.raw.replace(data, left), left, event.name)
    name = b"event: " + event.name + b"\n" if event.name else b""  # data over several lines
    return sse.Event(name + b"".join(b"data: " + line + b"\n" for line in left.split(b"\n")) + b"\n", left, event.name)


def _drop(answer: dict[str, Any], injected: Injected) -> bool:
    """Remove the keys that are there only since they were asked for. True if there were any."""
    found = False
    choices = answer.get("choices")
    if injected.dropped:
        for holder in [answer, *(choices if isinstance(choices, list) else [])]:
            for key in injected.dropped & holder.keys() if isinstance(holder, dict) else ():
                del holder[key]
                found = True
    extensions = answer.get("sglext")
    if injected.sglext and isinstance(extensions, dict):
        asked = injected.sglext & extensions.keys()
        for key in asked:
            del extensions[key]
        if asked and not extensions:
            del answer["sglext"]
        found |= bool(asked)
    return found


def _only_extensions(answer: dict[str, Any]) -> bool:
    """Whether a stripped event was there for ``sglext`` alone."""
    return answer.get("choices") == [] and "sglext" not in answer and answer.get("usage") is None


def _remove_ids(answer: dict[str, Any]) -> int:
    """Make the ids null, as they are when nobody asks. How many there were."""
    found = 0
    choices = answer.get("choices")
    for holder in [answer, *choices] if isinstance(choices, list) else [answer]:
        if isinstance(holder, dict):
            for key in ("prompt_token_ids", "token_ids"):
                if isinstance(holder.get(key), list):
                    holder[key] = None
                    found += 1
    return found


def _is_empty(choices: list[Any]) -> bool:
    """Whether a chat event exists only for its ids: no text, no role, no end, no log probabilities."""
    for choice in choices:
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(delta, dict):
            return False
        for value in delta.values():
            if value is not None:
                return False
        if choice.get("finish_reason") is not None or choice.get("logprobs") is not None:
            return False
    return bool(choices)
