"""Heads of HTTP/1.1 messages (RFC 9112), read strictly and passed on as the bytes that came.

A relay that reads a message otherwise than the server behind it lets requests be smuggled past it. So whatever two
readers could take in two ways is refused: obs-fold, a bare CR or LF, whitespace before the colon, a length that is not
one number, a length beside a transfer coding, a transfer coding other than `chunked` alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote_to_bytes

from driftwatch.tap.asgi import Headers

LARGEST_HEAD = 66 * 1024
"""Of a request: room for one field of 64 KiB beside the usual ones. Of an answer twice as much is taken."""

# RFC 9110, 7.6.1. Transfer-Encoding stays: framing is passed on as it is. So does Trailer, whose fields are passed on.
_HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade"))
# Named by a Connection field they would go missing at the engine, and the message with them.
_NEVER_DROPPED = frozenset((b"content-length", b"host", b"transfer-encoding"))

_NAME = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE = re.compile(rb"(" + _NAME + rb") ([^\x00-\x20\x7f]+) HTTP/(\d)\.(\d)")
_STATUS_LINE = re.compile(rb"HTTP/1\.(\d) ([1-9]\d\d)(?: [^\x00\r\n]*)?")
_FIELD = re.compile(_NAME + rb":[^\x00-\x08\x0a-\x1f\x7f]*")
# Whole sections are checked in one go: line by line takes three times as long.
_REQUEST_FIELDS = re.compile(rb"(?:" + _NAME + rb":[^\x00-\x08\x0a-\x1f\x7f]*\r\n)*\r\n")
# RFC 9110, 5.5: of NUL, CR and LF everybody must beware; other controls are the engine's own affair. And 9112, 5.1:
# whitespace before the colon of an answer's field is not passed on, but no reason to refuse the answer.
_ANSWER_FIELDS = re.compile(rb"(?:" + _NAME + rb"[ \t]*:[^\x00\r\n]*\r\n)*\r\n")
_SPACED_NAME = re.compile(rb"(" + _NAME + rb")[ \t]+:")
_NONE: frozenset[bytes] = frozenset()
_DIGITS = re.compile(rb"\d{1,18}")

Code = Literal["bad_request", "not_implemented", "uri_too_long", "head_too_large", "version_not_supported"]


class Malformed(Exception):
    """A message that is not passed on. ``status`` is what a client is told of its request."""

    def __init__(self, message: str, status: int = 400, code: Code = "bad_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(slots=True)
class _Head:
    start: bytes
    """The first line, without its end."""
    raw: list[bytes]
    """Field lines as they came, without their ends."""
    lines: Headers
    """The same as pairs, names in lower case."""
    old: bool
    """HTTP/1.0."""
    options: frozenset[bytes]
    """What Connection says, in lower case."""
    length: int | None
    chunked: bool
    upgrade: bool
    """It asks for, or agrees to, another protocol on this connection."""

    def end_to_end(self) -> Headers:
        return [line for line in self.lines if not self._dropped(line[0])]

    def _dropped(self, name: bytes) -> bool:
        return name in _HOP_BY_HOP or (name in self.options and name not in _NEVER_DROPPED)

    def _passed(self, *more: bytes) -> list[bytes]:
        """The lines to send on: fields as they came, without those of this connection."""
        kept = [
            line
            for line, (name, _) in zip(self.raw, self.lines, strict=True)
            if not self._dropped(name) or (self.upgrade and name == b"upgrade")
        ]
        return [*kept, b"Connection: Upgrade", *more] if self.upgrade else [*kept, *more]


@dataclass(slots=True)
class RequestHead(_Head):
    method: str
    target: bytes
    expects: bool
    """The client waits for 100 Continue before it sends the body (RFC 9110, 10.1.1)."""

    @property
    def closes(self) -> bool:
        """The client wants its connection closed behind the answer."""
        return self.old or b"close" in self.options

    @property
    def path(self) -> str:
        """The target's path, decoded."""
        path = self.target.partition(b"?")[0]
        if not path.startswith(b"/") and b"://" in path:  # absolute form
            path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
        return (unquote_to_bytes(path) if b"%" in path else path).decode("latin-1")

    def forward(self, prefix: bytes, headers: Headers | None = None) -> bytes:
        """The head for the engine: ``prefix`` before the path, other ``headers`` if its body was replaced.

        An HTTP/1.0 request stays one: so the engine sends no framing that its client could not read.
        """
        start = self.start
        if prefix and self.target.startswith(b"/"):
            start = start.replace(b" ", b" " + prefix, 1)
        if headers is None:
            lines = self._passed()
        else:
            # The new body has a length; a coding of the old one goes with it.
            ours = [line for line in headers if not self._dropped(line[0]) and line[0] != b"transfer-encoding"]
            lines = [name + b": " + value for name, value in ours]
        return b"\r\n".join([start, *lines, b"\r\n"])


@dataclass(slots=True)
class AnswerHead(_Head):
    status: int

    @property
    def persistent(self) -> bool:
        """The engine keeps its connection open."""
        return b"close" not in self.options and (not self.old or b"keep-alive" in self.options)

    @property
    def switches(self) -> bool:
        return self.status == 101

    def bodiless(self, method: str) -> bool:
        """RFC 9112, 6.3, rule 1: no body follows, whatever the fields say."""
        return method == "HEAD" or self.status < 200 or self.status in (204, 304)

    def forward(self, *, close: bool, length: int | None = None) -> bytes:
        """The head for the client; ``length`` is that of a body that was changed."""
        # RFC 9110, 2.5: a relay states the version that it speaks itself.
        start = b"HTTP/1.1" + self.start[8:] if self.old else self.start
        lines = self._passed(*((b"Connection: close",) if close else ()))
        if length is not None:
            lines = [
                line[: line.index(b":")] + b": %d" % length if line[:15].lower() == b"content-length:" else line
                for line in lines
            ]
        return b"\r\n".join([start, *lines, b"\r\n"])


def request(head: bytes) -> RequestHead:
    """Read a request's head, empty line included. Raises Malformed."""
    start, raw, lines = _split(head, _REQUEST_FIELDS)
    line = _REQUEST_LINE.fullmatch(start)
    if line is None:
        raise Malformed("the request line is malformed")
    method, target, major, minor = line.groups()
    if major != b"1":
        raise Malformed("this is an HTTP/1.1 server", 505, "version_not_supported")
    if method == b"CONNECT":
        raise Malformed("the tap is no forward proxy", 501, "not_implemented")
    old = minor == b"0"
    names = [name for name, _ in lines]
    hosts = names.count(b"host")
    if hosts > 1 or (hosts == 0 and not old):
        raise Malformed("a request has exactly one Host")  # RFC 9112, 3.2
    length, chunked = _request_framing(lines, old)
    options = frozenset(_tokens(lines, b"connection")) if b"connection" in names else _NONE
    upgrade = False
    if b"upgrade" in options and not old:
        # h2c would let a client speak to the engine in frames which nobody here reads; any upgrade may be ignored.
        protocols = _tokens(lines, b"upgrade")
        upgrade = bool(protocols) and b"h2c" not in protocols
    expects = b"expect" in names and not old and b"100-continue" in _tokens(lines, b"expect")
    return RequestHead(start, raw, lines, old, options, length, chunked, upgrade, method.decode(), target, expects)


def answer(head: bytes) -> AnswerHead:
    """Read an answer's head, empty line included. Raises Malformed."""
    start, raw, lines = _split(head, _ANSWER_FIELDS)
    line = _STATUS_LINE.fullmatch(start)
    if line is None:
        raise Malformed("the status line is malformed")
    names = [name for name, _ in lines]
    length, chunked = None, False
    if b"transfer-encoding" in names:
        # RFC 9112, 6.3, rule 3: the coding counts, and the length must not be passed on.
        if b"content-length" in names:
            raw, lines = _without_length(raw, lines)
        chunked = _tokens(lines, b"transfer-encoding")[-1:] == [b"chunked"]
    elif b"content-length" in names:
        lengths = {part.strip() for name, value in lines if name == b"content-length" for part in value.split(b",")}
        if len(lengths) > 1 or not _DIGITS.fullmatch(stated := lengths.pop()):
            raise Malformed("the length is not one number")
        length = int(stated)
        if names.count(b"content-length") > 1 or (b"content-length", stated) not in lines:
            raw, lines = _without_length(raw, lines)
            raw, lines = [*raw, b"Content-Length: " + stated], [*lines, (b"content-length", stated)]
    options = frozenset(_tokens(lines, b"connection")) if b"connection" in names else _NONE
    status = int(line[2])
    # 426 says which protocol it wants in a field of the same connection (RFC 9110, 15.5.22).
    upgrade = status in (101, 426) and b"upgrade" in names
    return AnswerHead(start, raw, lines, line[1] == b"0", options, length, chunked, upgrade, status)


def trailer(line: bytes) -> None:
    """Check a line of a trailer section. Raises Malformed."""
    if not _FIELD.fullmatch(line):
        raise Malformed("a trailer is malformed")


def _split(head: bytes, fields: re.Pattern[bytes]) -> tuple[bytes, list[bytes], Headers]:
    """The first line, the field lines, and these as pairs."""
    end = head.index(b"\r\n")
    if not fields.fullmatch(head, end + 2):
        raise Malformed("a field line is malformed")
    raw = head[end + 2 : -4].split(b"\r\n") if len(head) > end + 4 else []
    lines = []
    for number, one in enumerate(raw):
        name, _, value = one.partition(b":")
        if name[-1] in b" \t":
            raw[number] = _SPACED_NAME.sub(rb"\1:", one, count=1)
            name = name.rstrip(b" \t")
        lines.append((name.lower(), value.strip(b" \t")))
    return head[:end], raw, lines


def _request_framing(lines: Headers, old: bool) -> tuple[int | None, bool]:
    lengths = [value for name, value in lines if name == b"content-length"]
    codings = [value.lower() for name, value in lines if name == b"transfer-encoding"]
    if codings and (lengths or old):
        raise Malformed("Transfer-Encoding beside Content-Length, or in HTTP/1.0")
    if codings and codings != [b"chunked"]:
        raise Malformed("a transfer coding other than chunked alone")
    if len(lengths) > 1 or (lengths and not _DIGITS.fullmatch(lengths[0])):
        raise Malformed("Content-Length is not one number")
    return int(lengths[0]) if lengths else None, bool(codings)


def _tokens(lines: Headers, name: bytes) -> list[bytes]:
    return [part.strip(b" \t").lower() for key, value in lines if key == name for part in value.split(b",") if part]


def _without_length(raw: list[bytes], lines: Headers) -> tuple[list[bytes], Headers]:
    kept = [(one, line) for one, line in zip(raw, lines, strict=True) if line[0] != b"content-length"]
    return [one for one, _ in kept], [line for _, line in kept]
