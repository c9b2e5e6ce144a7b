"""Takes members out of a JSON answer as its bytes pass. All other bytes stay as they came, whatever they say.

Nothing is parsed into values and made anew, so numbers keep their digits and strings their escapes, what only Python
takes for JSON (NaN, lone surrogates) passes too, and an answer of any size costs the memory of one piece.

A name with its quotes and a colon behind it is a key, since within a string its quotes would be escaped. How deep it
lies is told by the brackets before it: complete strings are cut out, then pairs until only what is open remains.
"""

from __future__ import annotations

import re
from functools import lru_cache

_CONTENT = rb'(?:[^"\\]++|\\.)*+'
_STRING = re.compile(rb'"' + _CONTENT + rb'"', re.DOTALL)
_IN_STRING = re.compile(_CONTENT, re.DOTALL)
_OUTSIDE = re.compile(rb'(?:[^"]++|"' + _CONTENT + rb'")*+', re.DOTALL)
"""Up to a string that does not end here."""
_TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"' + _CONTENT + rb'")*+', re.DOTALL)
_SCALAR = re.compile(rb'(?:"' + _CONTENT + rb'"|[^\s,\]}"]++)(?=[\s,\]}])', re.DOTALL)
_SPACE = re.compile(rb"\s*")
_ANY_KEY = re.compile(rb'"' + _CONTENT + rb'"\s*:\s*(?=\S)', re.DOTALL)
# What may become a key when more comes: it waits.
_BEGUN = re.compile(rb'(?:,\s*)?(?:"[a-z_]{0,32}(?:"\s*(?::\s*)?)?)?\Z')
_LONGEST_BEGUN = 128
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

CHOICES, EXTENSIONS = b"choices", b"sglext"


@lru_cache(64)
def _keys(names: frozenset[bytes]) -> re.Pattern[bytes]:
    return re.compile(rb'(,\s*)?"(' + b"|".join(sorted(names)) + rb')"\s*:\s*(?=\S)')


class Surgeon:
    """Works on one answer: ``feed`` takes bytes and returns those for the client, ``close`` what still waits.

    In the answer itself and in each of its ``choices``, arrays under a name in ``nulled`` become null, and members
    named in ``dropped`` go. Members of ``sglext`` named in ``extensions`` go, and it too if no other is left.
    """

    def __init__(
        self,
        nulled: frozenset[bytes] = frozenset(),
        dropped: frozenset[bytes] = frozenset(),
        extensions: frozenset[bytes] = frozenset(),
    ) -> None:
        self._nulled = nulled
        self._dropped = dropped
        self._extensions = extensions
        self._key = _keys(nulled | dropped | extensions | {CHOICES} | ({EXTENSIONS} if extensions else set()))
        self._rest = b""
        self._path = b""
        """The brackets that are open."""
        self._inside = b""
        """The member of the answer that is open, if it is one of those two."""
        self._in_string = False
        self._skipping = 0
        """So many brackets of a value that goes are open."""
        self._comma = False
        """A member went that was the first: the comma behind it goes too."""
        self._pending: bytes | None = None
        """The beginning of ``sglext``, while nothing in it has stayed."""
        self._emptied = False

    def feed(self, data: bytes) -> bytes:
        buffer = self._rest + data
        self._rest = b""
        out: list[bytes] = []
        position = 0
        while position < len(buffer):
            if self._in_string:
                position = self._string(buffer, position, out)
            elif self._skipping:
                position = self._skip(buffer, position)
            elif self._comma:
                position = self._after_first(buffer, position, out)
            elif self._pending is not None:
                position = self._in_extensions(buffer, position, out)
            else:
                position = self._search(buffer, position, out)
        return b"".join(out)

    def close(self) -> bytes:
        rest, self._rest = self._rest, b""
        pending, self._pending = self._pending or b"", None
        return pending if self._skipping else pending + rest

    def _wait(self, buffer: bytes, position: int) -> int:
        """What is from here on is looked at again when more has come."""
        self._rest = buffer[position:]
        return len(buffer)

    def _string(self, buffer: bytes, position: int, out: list[bytes]) -> int:
        end = _IN_STRING.match(buffer, position).end()  # type: ignore[union-attr]
        closed = buffer[end : end + 1] == b'"'
        self._in_string = not closed
        out.append(buffer[position : end + closed])
        return end + 1 if closed else self._wait(buffer, end)

    def _search(self, buffer: bytes, position: int, out: list[bytes]) -> int:
        """To the next key that may matter."""
        key = self._key.search(buffer, position)
        if key is None:
            begun = _BEGUN.search(buffer, max(position, len(buffer) - _LONGEST_BEGUN))
            end = self._walk(buffer, position, begun.start())  # type: ignore[union-attr]
            out.append(buffer[position:end])
            return self._wait(buffer, end)
        self._walk(buffer, position, key.start())
        out.append(buffer[position : key.start()])
        return self._member(buffer, key, out)

    def _member(self, buffer: bytes, key: re.Match[bytes], out: list[bytes]) -> int:
        name, begin = key[2], key.end()
        first = buffer[begin : begin + 1]
        at_root = self._path == b"{"
        if at_root and ((name == CHOICES and first == b"[") or (name == EXTENSIONS and first == b"{")):
            self._path += first
            self._inside = name
            if name == EXTENSIONS and self._extensions:
                self._pending, self._emptied = key[0] + first, False
            else:
                out.append(key[0] + first)
            return begin + 1
        answer = at_root or (self._inside == CHOICES and self._path == b"{[{")
        if answer and name in self._nulled and first == b"[":
            out.append(key[0] + b"null")
            self._skipping = 1
            return begin + 1
        extension = self._inside == EXTENSIONS and self._path == b"{{" and name in self._extensions
        if extension or (answer and name in self._dropped):
            return self._drop(buffer, key, begin)
        out.append(key[0])
        return begin

    def _drop(self, buffer: bytes, key: re.Match[bytes], begin: int) -> int:
        if buffer[begin : begin + 1] in (b"[", b"{"):
            self._skipping, end = 1, begin + 1
        else:
            scalar = _SCALAR.match(buffer, begin)
            if scalar is None:
                return self._wait(buffer, key.start())
            end = scalar.end()
        self._comma = key[1] is None
        self._emptied = True
        return end

    def _skip(self, buffer: bytes, position: int) -> int:
        while self._skipping:
            position = _TO_BRACKET.match(buffer, position).end()  # type: ignore[union-attr]
            bracket = buffer[position : position + 1]
            if bracket in (b"", b'"'):
                return self._wait(buffer, position)
            self._skipping += 1 if bracket in b"[{" else -1
            position += 1
        return position

    def _after_first(self, buffer: bytes, position: int, out: list[bytes]) -> int:
        end = _SPACE.match(buffer, position).end()  # type: ignore[union-attr]
        if end == len(buffer):
            return self._wait(buffer, position)
        self._comma = False
        return end + 1 if buffer[end : end + 1] == b"," else position

    def _in_extensions(self, buffer: bytes, position: int, out: list[bytes]) -> int:
        begin = _SPACE.match(buffer, position).end()  # type: ignore[union-attr]
        pending, first = self._pending or b"", buffer[begin : begin + 1]
        if first == b"}":
            self._pending, self._path, self._inside = None, b"{", b""
            if self._emptied:
                self._comma = not pending.startswith(b",")
            else:
                out.append(pending + buffer[position : begin + 1])
            return begin + 1
        key = self._key.match(buffer, begin)
        if key is not None and key[2] in self._extensions:
            return self._drop(buffer, key, key.end())
        if (first in (b"", b'"')) and _ANY_KEY.match(buffer, begin) is None and len(buffer) - begin < _LONGEST_BEGUN:
            return self._wait(buffer, position)
        self._pending = None
        out.append(pending)
        return position

    def _walk(self, buffer: bytes, begin: int, end: int) -> int:
        """Follow the brackets; where this stops, which is the end unless that lies within an escape."""
        outside = _OUTSIDE.match(buffer, begin, end).end()  # type: ignore[union-attr]
        if outside < end:
            self._in_string = True
            end = _IN_STRING.match(buffer, outside + 1, end).end()  # type: ignore[union-attr]
        brackets = _STRING.sub(b"", buffer[begin:outside]).translate(None, _NO_BRACKETS)
        while len(paired := brackets.replace(b"{}", b"").replace(b"[]", b"")) < len(brackets):
            brackets = paired
        opened = brackets.lstrip(b"]}")
        left = max(0, len(self._path) - (len(brackets) - len(opened)))
        if left < 2:
            self._inside = b""
        self._path = self._path[:left] + opened
        return end
