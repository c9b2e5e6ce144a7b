from __future__ import annotations

import json
import logging
from collections.abc import Callable

import pytest

from driftwatch.settings import EngineKind
from driftwatch.tap.asking import ASKED_BYTES, PAUSE_S, Asking, headers_for
from driftwatch.tap.hooks import Request
from driftwatch.tap.metrics import Metrics
from driftwatch.tap.probe import Probe

CHAT = Request("POST", "/v1/chat/completions", [(b"host", b"h")])
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()


def asking(kind: EngineKind = "vllm", clock: Callable[[], float] = lambda: 7.0) -> tuple[Asking, Metrics]:
    metrics = Metrics()
    return Asking(Probe("http://127.0.0.1:9", kind), metrics, clock), metrics


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
        (Request("POST", "/v1/chat/completions", [(b"content-digest", b"sha-256=:x:")]), BODY, 0),
        (CHAT, b"{no json", 0),
    ],
)
def test_some_requests_go_as_they_are(request_: Request, body: bytes, counted: int) -> None:
    ours, metrics = asking()
    assert ours.ask(request_, body) is None
    assert not_asked(metrics) == counted


JSON = {"content-type": "application/json; charset=utf-8"}


@pytest.mark.parametrize("encoding", ["", "identity", " Identity"])
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream; charset=utf-8"])
def test_plain_answers_can_be_cut(kind: str, encoding: str) -> None:
    ours, _ = asking()
    injected = ours.ask(CHAT, BODY)
    assert injected is not None
    answer = {"content-type": kind} | ({"content-encoding": encoding} if encoding else {})
    assert ours.taken_out(injected, answer, lambda _: True) is not None
    assert ours.ask(CHAT, BODY) is not None


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (JSON | {"content-encoding": "gzip"}, "the engine answers in gzip although the tap declined that"),
        (JSON | {"content-encoding": "identity, br"}, "the engine answers in identity, br although"),
        ({"content-type": "text/plain"}, "the engine answers with a content-type of text/plain:"),
        ({}, "the engine answers with a content-type of nothing:"),
    ],
)
def test_an_engine_whose_answers_cannot_be_cut_is_not_asked_for_a_while_and_it_is_said_once(
    answer: dict[str, str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    now = 7.0
    ours, metrics = asking(clock=lambda: now)
    injected = ours.ask(CHAT, BODY)
    assert injected is not None
    with caplog.at_level(logging.WARNING):
        assert ours.taken_out(injected, answer, lambda _: True) is None
        ours.refused(422)
    assert [record.message.startswith(said) for record in caplog.records] == [True]
    assert ours.ask(CHAT, BODY) is None
    assert not_asked(metrics) == 1
    now += PAUSE_S
    assert ours.ask(CHAT, BODY) is not None, "it may have been mended or replaced"


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
