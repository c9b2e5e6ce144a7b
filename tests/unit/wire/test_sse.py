from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.wire.sse import Event, Parser, parse

LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
PAYLOADS = st.lists(st.binary(max_size=12).map(lambda data: data.translate(None, b"\r\n")), min_size=1, max_size=3)


def contents(events: list[Event]) -> list[tuple[bytes | None, bytes]]:
    return [(event.name, event.data) for event in events if event.data is not None]


def feed(pieces: list[bytes]) -> tuple[list[Event], bytes]:
    parser = Parser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events, parser.rest


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[tuple[bytes | None, bytes]]]:
    """A stream whose line ends are mixed event by event, and what it says."""
    text, expected = b"", []
    for lines in draw(st.lists(PAYLOADS, max_size=6)):
        end = draw(LINE_ENDS)
        name = draw(st.sampled_from([None, b"delta"]))
        if draw(st.booleans()):
            text += b": keep-alive" + end + (end if draw(st.booleans()) else b"")
        if name:
            text += b"event: " + name + end
        text += b"".join(b"data: " + line + end for line in lines) + end
        expected.append((name, b"\n".join(lines)))
    return text, expected


@given(streams(), st.data())
def test_events_do_not_depend_on_where_the_bytes_are_split(
    stream: tuple[bytes, list[tuple[bytes | None, bytes]]], data: st.DataObject
) -> None:
    text, expected = stream
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    events, rest = feed([text[start:end] for start, end in pairwise([0, *cuts, len(text)])])
    assert contents(events) == expected
    assert b"".join(event.raw for event in events) + rest == text


@given(st.lists(st.binary(max_size=30) | st.sampled_from([b"\n\n", b"\r\n\r", b"\n", b"data: x", b"\r"]), max_size=20))
def test_no_byte_is_ever_lost(pieces: list[bytes]) -> None:
    events, rest = feed(pieces)
    assert b"".join(event.raw for event in events) + rest == b"".join(pieces)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"data: a\n\n", [(None, b"a")]),
        (b"data:a\n\n", [(None, b"a")]),
        (b"data:  a\n\n", [(None, b" a")]),
        (b"data\n\n", [(None, b"")]),
        (b"data: a\ndata: b\n\n", [(None, b"a\nb")]),
        (b"event: done\r\ndata: a\r\n\r\n", [(b"done", b"a")]),
        (b"id: 7\nretry: 10\ndata: a\n\n", [(None, b"a")]),
        (b": keep-alive\n\ndata: a\n\n", [(None, b"a")]),
        (b"\n\n\ndata: a\n\n", [(None, b"a")]),
        (b"data: a\n\ndata: cut off", [(None, b"a")]),
        (b"data: a\n", []),
    ],
)
def test_what_a_stream_says(text: bytes, expected: list[tuple[bytes | None, bytes]]) -> None:
    assert contents(list(parse(text))) == expected


def test_an_event_is_given_with_its_last_byte() -> None:
    parser = Parser()
    assert list(parser.feed(b"data: a\r\n\r")) == [Event(b"data: a\r\n\r", b"a")]
    assert [event.data for event in parser.feed(b"\ndata: b\n\n")] == [b"b"]
