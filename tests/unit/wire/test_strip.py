"""What the client gets equals what it would have got from a vLLM that nobody asked for more."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.wire import sse, strip
from driftwatch.wire.injection import Injected
from driftwatch.wire.strip import Stripper, stripper, surgeon
from driftwatch.wire.surgery import Surgeon

from .conftest import Recorded

BOTH = Injected(b"", ids=True, usage=True)
IDS = Injected(b"", ids=True, usage=False)
SGLANG = Injected(b"", ids=False, usage=False, sglext=frozenset({"input_ids", "output_ids"}))
COMPLETION = Injected(b"", ids=False, usage=False, dropped=frozenset({"prompt_token_ids", "token_ids"}))


def EventStripper(injected: Injected, room: Callable[[int], bool] = lambda _: True) -> strip.EventStripper:
    return strip.EventStripper(injected, room)


def JsonStripper(injected: Injected) -> Stripper:
    return surgeon(injected)


def run(stripper: Stripper, pieces: Iterable[bytes]) -> bytes:
    return b"".join([*map(stripper.feed, pieces), stripper.close()])


def answers(body: bytes) -> list[Any]:
    data = [event.data for event in sse.parse(body) if event.data is not None]
    return [json.loads(item) if item != b"[DONE]" else "[DONE]" for item in data]


def to_stream(items: Iterable[Any]) -> bytes:
    texts = (item if item == "[DONE]" else json.dumps(item) for item in items)
    return "".join(f"data: {text}\n\n" for text in texts).encode()


def with_ids(items: list[Any]) -> list[Any]:
    """The same stream from an engine that was asked for ids."""
    items = json.loads(json.dumps(items))
    for item in items:
        if item == "[DONE]":
            continue
        if "prompt_token_ids" in item:
            item["prompt_token_ids"] = [1, 2, 3]
        for choice in item["choices"]:
            if "token_ids" in choice:
                choice["token_ids"] = [7]
    return list(items)


def with_usage(items: list[Any]) -> list[Any]:
    """The same stream from an engine that was asked for usage: the fingerprint moves to the event added."""
    *content, last, done = json.loads(json.dumps(items))
    usage = {"choices": [], "usage": {"completion_tokens": 1}, "system_fingerprint": last.pop("system_fingerprint")}
    return [*content, last, usage, done]


def without_ids(items: list[Any]) -> list[Any]:
    for item in items:
        if item != "[DONE]":
            strip._remove_ids(item)
    return items


def test_ids_are_taken_out_of_a_stream_with_usage(recorded: dict[str, Recorded]) -> None:
    plain = answers(recorded["no_token_ids_requested"].body)
    assert answers(run(EventStripper(IDS), [to_stream(with_ids(plain))])) == plain


def test_ids_and_usage_are_taken_out_of_a_stream(recorded: dict[str, Recorded]) -> None:
    plain = without_ids(answers(recorded["no_usage_requested"].body))
    assert "system_fingerprint" in plain[-2]
    engine = with_usage(with_ids(plain))
    assert answers(run(EventStripper(BOTH), [to_stream(engine)])) == plain


@given(cuts=st.lists(st.integers(0, 6000), max_size=20))
def test_the_split_of_the_bytes_does_not_matter(cuts: list[int], recorded: dict[str, Recorded]) -> None:
    body = recorded["plain"].body
    pieces = [body[start:end] for start, end in pairwise([0, *sorted(cuts), len(body)])]
    assert run(EventStripper(BOTH), pieces) == run(EventStripper(BOTH), [body])


def test_a_recorded_stream_loses_ids_and_usage_and_nothing_else(recorded: dict[str, Recorded]) -> None:
    out = answers(run(EventStripper(BOTH), recorded["plain"].pieces))
    before = answers(recorded["plain"].body)
    assert len(out) == len(before) - 1
    assert not any(item != "[DONE]" and item.get("usage") for item in out)
    assert b'token_ids":[' not in run(EventStripper(BOTH), recorded["plain"].pieces)
    texts = [item["choices"][0]["delta"].get("content") for item in out[:-1]]
    assert texts == [item["choices"][0]["delta"].get("content") for item in before[:-2]]
    assert out[-2]["system_fingerprint"] == "vllm-0.32.0-92e136f8"


def test_a_recorded_completion_keeps_its_running_usage(recorded: dict[str, Recorded]) -> None:
    """An engine that is forced to state usage would have done so without the tap: the last event stays."""
    completion = recorded["extra_stream_completion"]
    out = answers(run(EventStripper(BOTH), completion.pieces))
    assert out == without_ids(answers(completion.body))


def test_events_that_only_carry_ids_are_dropped() -> None:
    role: dict[str, Any] = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    empty: dict[str, Any] = {"choices": [{"delta": {}, "finish_reason": None, "token_ids": [5]}]}
    nulls = {"choices": [{"delta": {"content": None}, "finish_reason": None, "token_ids": [5]}]}
    logprobs: dict[str, Any] = {"choices": [{"delta": {}, "finish_reason": None, "logprobs": {}, "token_ids": [5]}]}
    last = {"choices": [{"delta": {}, "finish_reason": "stop", "token_ids": [5]}]}
    out = answers(run(EventStripper(IDS), [to_stream([role, empty, nulls, logprobs, last, "[DONE]"])]))
    assert out == [role, *without_ids([logprobs, last]), "[DONE]"]


def test_content_is_passed_on_at_once_and_only_a_last_event_waits(recorded: dict[str, Recorded]) -> None:
    stripper = EventStripper(BOTH)
    *content, last, _usage, _done = (event.raw for event in sse.parse(recorded["plain"].body))
    assert all(stripper.feed(piece) for piece in content)
    assert stripper.feed(last) == b""
    assert stripper.close()


def test_what_is_not_understood_passes_byte_for_byte() -> None:
    text = (
        b': keep-alive\n\nevent: x\r\ndata: {not json\r\n\r\ndata: 3\n\ndata: {"error":{}}\n\ndata: [DONE]\n\ndata: cut'
    )
    assert run(EventStripper(BOTH), [text]) == text


def test_events_without_ids_keep_their_bytes() -> None:
    text = b'data: {"choices" : [ {"delta":{"content":"a"} } ] }\n\n'
    assert run(EventStripper(BOTH), [text]) == text


def test_data_over_several_lines_is_stripped() -> None:
    text = b'event: e\ndata: {"choices": [{"delta": {"content": "a"},\ndata: "token_ids": [1]}]}\n\n'
    (event,) = sse.parse(run(EventStripper(IDS), [text]))
    assert event.name == b"e"
    assert json.loads(event.data or b"") == {"choices": [{"delta": {"content": "a"}, "token_ids": None}]}


@given(
    st.lists(
        st.sampled_from(
            [
                b'data: {"choices":[{"delta":{"content":"a"},"token_ids":[1]}]}\n\n',
                b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}\n\n',
                b'data: {"choices":[],"usage":{},"system_fingerprint":"f"}\n\n',
                b'data: {"choices":[3,null]}\n\n',
                b'data: {"choices":[{"delta":null,"token_ids":[1]}]}\n\n',
                b"data: [DONE]\n\n",
                b"\r\n",
            ]
        )
        | st.binary(max_size=8),
        max_size=30,
    )
)
def test_content_is_never_lost(pieces: list[bytes]) -> None:
    body, out = b"".join(pieces), run(EventStripper(BOTH), pieces)
    for content in (b'"a"', b'"b"', b"[DONE]"):
        assert out.count(content) == body.count(content)


LONG = list(range(300_000))


@pytest.mark.parametrize("size", [1_000, 65_536, 5_000_000])
@pytest.mark.parametrize("room", [True, False])
def test_a_large_event_is_stripped_without_being_held_back(size: int, room: bool) -> None:
    first = {"choices": [{"delta": {"role": "assistant"}, "token_ids": [1]}], "prompt_token_ids": LONG}
    content = {"choices": [{"delta": {"content": "a" * 3_000_000}, "token_ids": [1]}]}
    stream = to_stream([first, content, first, "[DONE]"])
    stripper = EventStripper(IDS, lambda _: room)
    out, held = b"", 0
    for start in range(0, len(stream), size):
        out += stripper.feed(stream[start : start + size])
        held = max(held, len(stripper._parser))
    assert answers(out + stripper.close()) == [*without_ids(json.loads(json.dumps([first, content, first]))), "[DONE]"]
    assert held <= (strip.LARGEST if room else strip.SMALL)


def test_room_is_asked_for_what_is_held_back() -> None:
    asked: list[int] = []

    def room(size: int) -> bool:
        asked.append(size)
        return True

    stripper = EventStripper(IDS, room)
    for _ in range(5):
        stripper.feed(b"data: " + b"x" * strip.SMALL)
    assert len(stripper._parser) <= strip.SMALL + sum(asked)


def test_an_endless_event_passes() -> None:
    pieces = [b"data: ", b"x" * 2_000_000, b"y" * 200, b"\n\n"]
    for one in (EventStripper(BOTH), JsonStripper(IDS)):
        assert run(one, pieces) == b"".join(pieces)


@pytest.mark.parametrize("odd", ["NaN", "-Infinity", '"\\ud800"', "123456789012345678901234567890", "1.10", "1e999"])
@pytest.mark.parametrize("injected", [BOTH, SGLANG, COMPLETION])
def test_nothing_asked_for_leaks_beside_what_strict_readers_refuse(odd: str, injected: Injected) -> None:
    """And what stays keeps every byte: no number is made anew."""
    choice = '{"index":0,"delta":{"content":"a"},"odd":%s%s}'
    ids = ',"token_ids":[1,2]' if injected is not SGLANG else ""
    sglext = ',"sglext":{"input_ids":[7],"output_ids":[[1,2]]}' if injected is SGLANG else ""
    event = '{"odd":%s,"choices":[%s]%s}'
    left = ',"token_ids":null' if injected is BOTH else ""
    asked = event % (odd, choice % (odd, ids), sglext)
    wanted = event % (odd, choice % (odd, left), "")
    assert run(EventStripper(injected), [f"data: {asked}\n\n".encode()]) == f"data: {wanted}\n\n".encode()
    assert run(surgeon(injected), [asked.encode()]) == wanted.encode()


def test_a_key_of_that_name_elsewhere_stays() -> None:
    event = (
        b'data: {"choices":[{"delta":{"content":"a","x":{"token_ids":[1]}},"token_ids":[2]}],"y":[{"token_ids":[3]}]}'
    )
    event += b"\n\n"
    assert run(EventStripper(IDS), [event]) == event.replace(b"[2]", b"null")


def test_a_fingerprint_moves_to_the_last_event_and_nothing_else_of_it_changes() -> None:
    last = b'data: {"choices":[{"delta":{},"finish_reason":"stop","x":1.0e5}]  }\n\n'
    usage = b'data: {"choices":[],"usage":{},"system_fingerprint":"f"}\n\n'
    out = run(EventStripper(BOTH), [last, usage])
    assert out == last.replace(b"}\n", b',"system_fingerprint":"f"}\n')


def test_ids_are_taken_out_of_a_plain_answer(recorded: dict[str, Recorded]) -> None:
    body = recorded["extra_nonstream_chat"].body
    expected = json.loads(body)
    expected["prompt_token_ids"] = expected["choices"][0]["token_ids"] = None
    assert json.loads(run(JsonStripper(IDS), [body[:100], body[100:]])) == expected


@pytest.mark.parametrize("body", [b"", b"{", b"[1, 2]", b'{"choices": 3}', b'{"choices": [ ]}', b"\xff"])
def test_a_plain_answer_without_ids_keeps_its_bytes(body: bytes) -> None:
    assert run(JsonStripper(IDS), [body]) == body


def test_the_media_type_decides() -> None:
    assert isinstance(stripper(IDS, "text/event-stream", bool), strip.EventStripper)
    assert isinstance(stripper(IDS, "application/json", bool), Surgeon)
    assert stripper(IDS, "text/plain", bool) is None


SHOWN = 90210
"""An id that only the tap asks for; so is a count of tokens like it."""


@given(st.data())
@pytest.mark.parametrize("injected", [BOTH, SGLANG, COMPLETION])
def test_an_answer_that_breaks_off_anywhere_shows_nothing_that_was_asked_for(
    injected: Injected, data: st.DataObject
) -> None:
    ids: dict[str, Any] = {} if injected is SGLANG else {"token_ids": [SHOWN, SHOWN]}
    prompt = {} if injected is SGLANG else {"prompt_token_ids": [SHOWN]}
    choice = {"index": 0, "delta": {"content": 'a "token_ids": [1], '}, "finish_reason": None} | ids
    items: list[Any] = [{"id": "c", "choices": [choice]} | prompt, {"choices": [choice | {"finish_reason": "stop"}]}]
    if injected is BOTH:
        items.append({"id": "c", "choices": [], "usage": {"completion_tokens": SHOWN}})
    if injected is SGLANG:
        items.append({"id": "c", "choices": [], "sglext": {"input_ids": [SHOWN], "output_ids": [[SHOWN]]}})
    body = to_stream(items)
    end = data.draw(st.integers(0, len(body)))
    cuts = sorted(data.draw(st.lists(st.integers(0, end), max_size=4)))
    pieces = [body[start:stop] for start, stop in pairwise([0, *cuts, end])]
    out = run(EventStripper(injected), pieces)
    assert b"902" not in out
    assert out.count(b"content") == body[:end].count(b"content")
    plain = json.dumps(items[0]).encode()
    end = min(end, len(plain))
    assert b"902" not in run(surgeon(injected), [plain[: end // 2], plain[end // 2 : end]])
