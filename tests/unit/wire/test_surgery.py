"""Surgery on the bytes of a JSON answer against the same change made on its values."""

from __future__ import annotations

import json
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftwatch.wire.surgery import Surgeon

NULLED = frozenset({b"token_ids", b"prompt_token_ids"})
ASKED = frozenset({b"input_ids", b"output_ids"})
NAMES = ["token_ids", "prompt_token_ids", "choices", "sglext", "input_ids", "output_ids", "text", "a"]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(['"token_ids": [1]', "\\", '\\"', "token_ids", "[{", "\ud800", ', "choices": ['])
)
values = st.recursive(
    scalars | st.lists(st.integers(0, 10**6), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=12,
)
members = st.dictionaries(st.sampled_from(NAMES), values, max_size=6)
answers = st.fixed_dictionaries(
    {}, optional={**dict.fromkeys(NAMES, values), "choices": st.lists(members, max_size=3), "sglext": members}
)


def operated(surgeon: Surgeon, data: bytes, cuts: list[int]) -> bytes:
    places = sorted(place % (len(data) + 1) for place in cuts)
    return b"".join([*(surgeon.feed(data[a:b]) for a, b in pairwise([0, *places, len(data)])), surgeon.close()])


def holders(answer: dict[str, Any]) -> list[dict[str, Any]]:
    choices = answer.get("choices")
    return [answer, *(one for one in (choices if isinstance(choices, list) else []) if isinstance(one, dict))]


def nulled(answer: dict[str, Any]) -> dict[str, Any]:
    for holder in holders(answer):
        for key in ("token_ids", "prompt_token_ids"):
            if isinstance(holder.get(key), list):
                holder[key] = None
    return answer


def dropped(answer: dict[str, Any]) -> dict[str, Any]:
    for holder in holders(answer):
        for key in ("token_ids", "prompt_token_ids"):
            holder.pop(key, None)
    extensions = answer.get("sglext")
    if isinstance(extensions, dict):
        found = [extensions.pop(key) for key in ("input_ids", "output_ids") if key in extensions]
        if found and not extensions:
            del answer["sglext"]
    return answer


def same(data: bytes, wanted: dict[str, Any]) -> bool:
    return json.dumps(json.loads(data)) == json.dumps(wanted)  # as text: NaN equals nothing, not even itself


@settings(max_examples=400, deadline=None)
@given(answers, st.lists(st.integers(0, 2000), max_size=8), st.sampled_from([None, 1]), st.booleans())
def test_it_is_the_same_change_as_on_the_values(
    answer: dict[str, Any], cuts: list[int], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(answer, indent=indent, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    assert same(operated(Surgeon(NULLED), text, cuts), nulled(json.loads(text)))
    assert same(operated(Surgeon(frozenset(), NULLED, ASKED), text, cuts), dropped(json.loads(text)))


@settings(deadline=None)
@given(st.lists(st.sampled_from([b'"', b"\\", b"[", b"}", b",", b'"choices":[', b"\n\n", b"\xff", b"x" * 200])))
def test_bytes_without_such_a_key_pass_whatever_they_are(pieces: list[bytes]) -> None:
    surgeon = Surgeon(NULLED, frozenset(), ASKED)
    assert b"".join([*map(surgeon.feed, pieces), surgeon.close()]) == b"".join(pieces)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_what_stays_keeps_its_bytes(size: int) -> None:
    odd = rb'{ "n" : NaN , "s":"\ud800\\\"" ,"big": 123456789012345678901234567890,"f":1.10, "a":1,"a":2'
    text = odd + rb' , "choices" :[{"token_ids": [1, [2]] , "text":"\"token_ids\": [1]"}], "deep":{"token_ids":[1]}}'
    wanted = text.replace(b"[1, [2]]", b"null")
    assert operated(Surgeon(NULLED), text, list(range(0, len(text), size))) == wanted


def test_an_answer_of_any_size_passes_in_the_memory_of_a_piece() -> None:
    surgeon = Surgeon(NULLED)
    pieces = [b'{"choices":[{"text":"', *[b'\\"abc' * 10_000] * 100, b'","token_ids":[1', *[b",123456" * 10_000] * 100]
    tracemalloc.start()
    passed = sum(len(surgeon.feed(piece)) for piece in [*pieces, b"]}]}"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert passed == sum(map(len, pieces[:101])) + len(b'","token_ids":null}]}')
    assert peak < 1_000_000
