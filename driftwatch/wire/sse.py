"""Server-sent events, read incrementally from arbitrary pieces of bytes.

https://html.spec.whatwg.org/multipage/server-sent-events.html: lines end in LF, CRLF or CR, a blank line ends an event,
a line that starts with a colon is a comment. Every byte fed comes out again, in the events' ``raw`` and in ``rest``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

# A lone CR ends a line only if no LF follows. The lookahead also keeps CRLF from being read as two line ends.
_LINE_END = rb"(?:\r\n|\r(?!\n)|\n)"
_BLANK_LINE = re.compile(_LINE_END + _LINE_END)
_LINES = re.compile(rb"\r\n|\r|\n")
_LONGEST_END = 4


class Event(NamedTuple):
    """One block of the stream, its blank line included."""

    raw: bytes
    data: bytes | None
    """The ``data`` lines joined by LF; None for a block without one (comments, keep-alives)."""
    name: bytes | None = None


class Parser:
    """Cuts a stream into events. A block that the stream's end cuts off is no event; it stays in ``rest``."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._passed = b""
        """The last bytes of an event that was let go: its end may have begun."""

    @property
    def rest(self) -> bytes:
        """What was fed and is not yet part of an event."""
        return bytes(self._buffer)

    def __len__(self) -> int:
        """Bytes in ``rest``."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield the events that ``data`` completes. Exhaust it before feeding more."""
        buffer = self._buffer
        if not buffer and b"\r" not in data:  # as most pieces are
            begin = 0
            while (end := data.find(b"\n\n", begin) + 2) > 1:
                yield _event(data[begin:end])
                begin = end
            buffer += data[begin:]
            return
        # A blank line may have begun in what came before; further back there is none, or it would have been found.
        position = max(0, len(buffer) - _LONGEST_END + 1)
        buffer += data
        while match := _BLANK_LINE.search(buffer, position):
            raw = bytes(buffer[: match.end()])
            del buffer[: match.end()]
            position = 0
            yield _event(raw)

    def let_go(self) -> bytes:
        """Take the bytes of an unfinished event, to pass them on before its end has come."""
        taken = self.rest
        self._buffer.clear()
        self._passed = taken[-_LONGEST_END + 1 :]
        return taken

    def through(self, data: bytes) -> tuple[bytes, bytes | None]:
        """The bytes of the event that was let go, and those behind it; None while it goes on."""
        seen = self._passed + data
        end = _BLANK_LINE.search(seen)
        if end is None:
            self._passed = seen[-_LONGEST_END + 1 :]
            return data, None
        position = end.end() - len(self._passed)
        return data[:position], data[position:]


def parse(data: bytes) -> Iterator[Event]:
    """All events of a complete stream."""
    return Parser().feed(data)


def _event(raw: bytes) -> Event:
    if raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2 and b"\r" not in raw:
        return Event(raw, raw[6:-2])  # as most are
    values: list[bytes] = []
    name: bytes | None = None
    for line in _LINES.split(raw):
        field, _, value = line.partition(b":")
        if field == b"data":
            values.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")
    return Event(raw, b"\n".join(values) if values else None, name)
