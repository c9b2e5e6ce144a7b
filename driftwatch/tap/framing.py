"""Where a message's body ends (RFC 9112, 6 and 7): found in the bytes as they come, which pass on unchanged."""

from __future__ import annotations

import re
from typing import Protocol

from driftwatch.tap.http1 import LARGEST_HEAD, Malformed, trailer

LONGEST_LINE = 4096
"""Of a chunk's size with its extensions, which nobody needs (RFC 9112, 7.1.1)."""

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[^\x00-\x08\x0a-\x1f\x7f]*)?\r\n")


class Framing(Protocol):
    """Follows one body."""

    complete: bool

    def take(self, data: bytes, content: list[bytes] | None) -> int:
        """How many of these bytes belong to the body; what it says is added to ``content``. Raises Malformed."""


class Length:
    """A body of a known number of bytes."""

    __slots__ = ("_left", "complete")

    def __init__(self, length: int) -> None:
        self._left = length
        self.complete = length == 0

    def take(self, data: bytes, content: list[bytes] | None) -> int:
        count = len(data)
        if count >= self._left:
            count = self._left
            data = data[:count]
            self.complete = True
        self._left -= count
        if content is not None and count:
            content.append(data)
        return count


class UntilClose:
    """A body that ends with its connection."""

    __slots__ = ("complete",)

    def __init__(self) -> None:
        self.complete = False

    def take(self, data: bytes, content: list[bytes] | None) -> int:
        if content is not None:
            content.append(data)
        return len(data)


class Chunked:
    """A chunked body with its trailer section."""

    __slots__ = ("_in_trailers", "_left", "_line", "complete", "trailers")

    def __init__(self) -> None:
        self.complete = False
        self.trailers = b""
        """Lines of the trailer section, with the empty line at its end."""
        self._left = -1
        """Bytes of the present chunk to come; 0: the CRLF behind it; -1: a line is next."""
        self._line = b""
        """What came of a line so far."""
        self._in_trailers = False

    def take(self, data: bytes, content: list[bytes] | None) -> int:
        position, size = 0, len(data)
        while position < size and not self.complete:
            if self._left < 0 and not self._line and not self._in_trailers:
                # Most chunks come whole.
                found = _SIZE.match(data, position)
                if found is not None and found.end() - position <= LONGEST_LINE:
                    begin = found.end()
                    stop = begin + int(found[1], 16)
                    if stop > begin and data.startswith(b"\r\n", stop):
                        if content is not None:
                            content.append(data[begin:stop])
                        position = stop + 2
                        continue
            if self._left > 0:
                stop = min(position + self._left, size)
                if content is not None:
                    content.append(data[position:stop])
                self._left -= stop - position
                position = stop
                continue
            end = data.find(b"\n", position) + 1
            if end == 0:
                self._line += data[position:]
                self._check_partial()
                return size
            line = self._line + data[position:end] if self._line else data[position:end]
            self._line = b""
            position = end
            self._read(line)
        return position

    def _read(self, line: bytes) -> None:
        if self._left == 0:
            if line != b"\r\n":
                raise Malformed("a chunk is longer than it says")
            self._left = -1
        elif self._in_trailers:
            self._read_trailer(line)
        else:
            found = _SIZE.fullmatch(line)
            if found is None or len(line) > LONGEST_LINE:
                raise Malformed("the size of a chunk is malformed")
            self._left = int(found[1], 16)
            if self._left == 0:
                self._left, self._in_trailers = -1, True

    def _read_trailer(self, line: bytes) -> None:
        self.trailers += line
        if len(self.trailers) > LARGEST_HEAD:
            raise Malformed("the trailer section is too large")
        if line == b"\r\n":
            self.complete = True
        elif line.endswith(b"\r\n"):
            trailer(line[:-2])
        else:
            raise Malformed("a line ends without CR")

    def _check_partial(self) -> None:
        """Refuse at once what no further bytes can make right."""
        line = self._line
        limit = 2 if self._left == 0 else LARGEST_HEAD if self._in_trailers else LONGEST_LINE
        if len(line) > limit or b"\r" in line[:-1] or (self._left == 0 and line[:1] not in (b"", b"\r")):
            raise Malformed("a chunked body is malformed")
