from __future__ import annotations

import json
import logging

import pytest

from driftwatch.settings import EngineKind
from driftwatch.tap.asking import ASKED_BYTES, Asking, headers_for
from driftwatch.tap.hooks import Request
from driftwatch.tap.metrics import Metrics
from driftwatch.tap.probe import Probe

CHAT = Request("POST", "/v1/chat/completions", [(b"host", b"h")])
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()


def asking(kind: EngineKind = "vllm") -> tuple[Asking, Metrics]:
    metrics = Metrics()
    return Asking(Probe("http://127.0.0.1:9", kind), metrics), metrics


def not_asked(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("driftwatch_not_asked_total")


@pytest.mark.parametrize(("kind", "asked"), [("vllm", True), ("sglang", True), ("trtllm", False), ("openai", False)])
def test_only_engines_that_take_it_are_asked(kind: EngineKind, asked: bool) -> None:
    ours, metrics = asking(kind)
    assert (ours.ask(CHAT, BODY) is not None) is asked
    assert not_asked(metrics) == 0


@pytest.mark.parametrize(
    ("request_", "body", "counted"),
    [
        (CHAT, BODY[:-1] + b', "x": "' + b"x" * ASKED_BYTES + b'"}', 1),
        (CHAT, BODY[:-1] + b', "seed": 1234567890123456789012}', 0),
        (Request("POST", "/v1/chat/completions", [(b"x-sglext-return-output-ids", b"1")]), BODY, 0),
        (CHAT, b"{no json", 0),
    ],
)
def test_some_requests_go_as_they_are(request_: Request, body: bytes, counted: int) -> None:
    ours, metrics = asking()
    assert ours.ask(request_, body) is None
    assert not_asked(metrics) == counted


def test_an_engine_that_compresses_all_the_same_is_asked_once_and_said_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, metrics = asking()
    for encoding in ("", "identity", " Identity"):
        assert ours.strippable(encoding)
    assert ours.ask(CHAT, BODY) is not None
    with caplog.at_level(logging.WARNING):
        assert not ours.strippable("gzip")
        assert not ours.strippable("br")
    assert [record.message.startswith("the engine answers in gzip although") for record in caplog.records] == [True]
    assert ours.ask(CHAT, BODY) is None
    assert not_asked(metrics) == 1


def test_a_replaced_request_states_its_length_and_declines_compression() -> None:
    ours, _ = asking()
    injected = ours.ask(CHAT, BODY)
    assert injected is not None
    length = b"%d" % len(injected.body)
    lines = [(b"host", b"h"), (b"accept-encoding", b"gzip"), (b"content-length", b"5")]
    assert headers_for(lines, injected) == [
        (b"host", b"h"),
        (b"accept-encoding", b"identity"),
        (b"content-length", length),
    ]
    assert headers_for(lines[:1], injected) == [(b"host", b"h"), (b"content-length", length)]
