"""Heads that pass are read as another parser reads them; framing does not depend on where the bytes are cut."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftwatch.tap import http1
from driftwatch.tap.framing import Chunked, Length
from driftwatch.tap.http1 import Malformed

NAMES = st.sampled_from(
    [
        b"Host",
        b"X-A",
        b"content-length",
        b"Transfer-Encoding",
        b"Connection",
        b"Upgrade",
        b"X_b!#$%&'*+.^`|~",
        b"Expect",
    ]
)
VALUES = st.one_of(
    st.sampled_from([b"1", b"0", b"chunked", b"close", b"x, Upgrade", b"100-continue", b"gzip, chunked", b"", b"h2c"]),
    st.binary(max_size=8),
)
BREAKS = st.sampled_from([b"\r\n"] * 12 + [b"\n", b"\r", b"\r\n ", b"\r\r\n"])
COLONS = st.sampled_from([b": "] * 12 + [b":", b" :", b":\t", b"", b": \t "])
STARTS = st.sampled_from(
    [b"GET /a HTTP/1.1", b"POST /?q HTTP/1.1", b"POST * HTTP/1.0", b"PROPFIND /a%ff HTTP/1.1", b"GET  / HTTP/1.1"]
)


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    lines = draw(st.lists(st.tuples(NAMES, COLONS, VALUES, BREAKS), max_size=5))
    start = draw(STARTS) + draw(BREAKS) + draw(st.sampled_from([b"Host: x\r\n", b""]))
    return start + b"".join(name + colon + value + end for name, colon, value, end in lines) + b"\r\n"


class Reader:
    def __init__(self) -> None:
        self.lines: list[tuple[bytes, bytes]] = []
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.lines.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.complete = True


@settings(max_examples=300, deadline=None)
@given(heads())
def test_a_head_that_passes_is_read_alike_by_another_parser(head: bytes) -> None:
    head = head.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    try:
        found = http1.request(head)
    except Malformed:
        return
    reader = Reader()
    parser = httptools.HttpRequestParser(reader)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        assert b"upgrade" in found.options
    assert reader.complete
    assert reader.lines == found.lines
    assert parser.get_method() == found.method.encode()
    lengths = [value for name, value in reader.lines if name == b"content-length"]
    assert lengths == ([] if found.length is None else [b"%d" % found.length]) or int(lengths[0]) == found.length
    assert not (found.chunked and lengths)
    passed = found.forward(b"")
    kept = [line for line in head[:-4].split(b"\r\n") if line in passed.split(b"\r\n")]
    assert passed.startswith(found.start + b"\r\n")
    assert b"\r\n".join(kept) in passed, "in order, as they came"
    again = http1.request(passed)
    assert (again.length, again.chunked, again.method, again.target) == (
        found.length,
        found.chunked,
        found.method,
        found.target,
    )


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.sampled_from([b"", b"1\r\na\r\n0\r\n\r\n", b"5;x\r\nhello\r\n0\r\nA: b\r\n\r\nrest"]))
def test_cutting_changes_nothing(data: bytes, start: bytes) -> None:
    """Byte by byte or at once: the same content, the same end, the same verdict."""
    data = start + data
    results = []
    for size in (len(data) or 1, 1, 3):
        framing, content, taken = Chunked(), list[bytes](), 0
        try:
            for first in range(0, len(data), size):
                if not framing.complete:
                    taken += framing.take(data[first : first + size], content)
            results.append((framing.complete, taken, b"".join(content), framing.trailers))
        except Malformed:
            results.append((False, -1, b"", b""))
    assert results[1] == results[2]
    if results[0][1] >= 0 and results[1][1] >= 0:
        assert results[0] == results[1]


def test_a_length_takes_no_byte_more() -> None:
    framing, content = Length(5), list[bytes]()
    assert (framing.take(b"abc", content), framing.complete) == (3, False)
    assert (framing.take(b"defg", content), framing.complete) == (2, True)
    assert b"".join(content) == b"abcde"
    assert Length(0).complete


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/v1/completions?x=/y", "/v1/completions"),
        (b"/v1%2Fcompletions", "/v1/completions"),
        (b"http://engine:8000/v1/completions", "/v1/completions"),
        (b"http://engine", "/"),
        (b"*", "*"),
    ],
)
def test_the_path_of_a_target(target: bytes, path: str) -> None:
    assert http1.request(b"POST " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n").path == path


def test_a_prefix_comes_before_the_path_and_nothing_else_changes() -> None:
    head = http1.request(b"GET /a?b HTTP/1.1\r\nHost: x\r\n\r\n")
    assert head.forward(b"/base") == b"GET /base/a?b HTTP/1.1\r\nHost: x\r\n\r\n"
