from __future__ import annotations

import json

import pytest

from driftwatch.tap import glance


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        (b'{"usage": {"prompt_tokens": 3, "completion_tokens": 7}}', 7),
        (b'{"usage":{"output_tokens":9}}', 9),
        (b'data: {"usage":{"completion_tokens":1}}\n\ndata: {"usage":{"completion_tokens":4}}\n\n', 4),
        (b'data: {"sglext": {"output_ids": [[1, 2, 3]]}}\n\n', 3),
        (json.dumps({"text": '"completion_tokens": 5'}).encode(), None),
        (b"{}", None),
    ],
)
def test_tokens_are_the_engines_own_last_count(answer: bytes, tokens: int | None) -> None:
    assert glance.tokens(answer) == tokens


def test_the_fingerprint_is_the_last_one() -> None:
    assert glance.fingerprint(b'{"system_fingerprint": "a"}{"system_fingerprint":"b"}') == "b"
    assert glance.fingerprint(b'{"system_fingerprint": null}') is None


@pytest.mark.parametrize(
    ("last", "ended", "failed"),
    [
        (b"data: 1\n\ndata: [DONE]\n\n", True, False),
        (b"data: [DONE]\r\n\r\n", True, False),
        (b'data: {"text": "data: [DONE]"}\n\n', False, False),
        (b'data: {"error": {"message": "m"}}\n\ndata: [DONE]\n\n', True, True),
        (b'data: {"text": "data: {\\"error\\""}\n\n', False, False),
    ],
)
def test_how_a_stream_ended(last: bytes, ended: bool, failed: bool) -> None:
    assert (glance.has_ended(last), glance.has_failed(last)) == (ended, failed)


@pytest.mark.parametrize(
    ("request_", "several", "huge"),
    [
        ({"n": 1, "prompt": "a"}, False, False),
        ({"n": 2}, True, False),
        ({"best_of": 12}, True, False),
        ({"prompt": '"n": 2'}, False, False),
        ({"seed": 2**63}, False, True),
        ({"seed": 2**53}, False, False),
    ],
)
def test_what_a_request_asks_for(request_: dict[str, object], several: bool, huge: bool) -> None:
    body = json.dumps(request_).encode()
    assert (glance.asks_for_several(body), glance.has_huge_numbers(body)) == (several, huge)
