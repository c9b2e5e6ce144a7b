from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import Callable

import pytest

from driftwatch.settings import EngineKind, Segment
from driftwatch.tap.asking import ASKED_BYTES
from driftwatch.tap.hooks import Ending, Request
from driftwatch.tap.memory import Memory
from driftwatch.tap.metrics import DROP_REASONS, Metrics, outcome_of
from driftwatch.tap.probe import Probe
from driftwatch.tap.recorder import Recorder
from driftwatch.tap.sampler import Sampler
from driftwatch.tap.segments import Segments
from driftwatch.wire.exchange import Exchange

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
STREAM = [(b"content-type", b"text/event-stream")]
JSON = [(b"content-type", b"application/json"), (b"content-length", b"9")]
CHAT = "/v1/chat/completions"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A recorder with its parts in reach."""

    def __init__(
        self,
        kind: EngineKind = "openai",
        capture_bytes: int = 1000,
        memory: int = 1_000_000,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.metrics = Metrics()
        self.clock = Clock()
        self.memory = Memory(memory)
        self.sampler = Sampler[Exchange](8, 15.0, draw=draw)
        segments = Segments([Segment(label="tenant", header="x-tenant")])
        probe = Probe("http://127.0.0.1:9", kind)
        self.recorder = Recorder(
            capture_bytes, segments, self.sampler, probe, self.metrics, self.memory, clock=self.clock
        )

    async def exchange(
        self,
        pieces: list[bytes],
        *,
        ending: Ending = "complete",
        whole: bool = True,
        status: int = 200,
        body: bytes | None = BODY,
        headers: list[tuple[bytes, bytes]] = STREAM,
        request_headers: dict[str, str] | None = None,
        path: str = CHAT,
    ) -> bytes:
        """Go through the hooks as the relay does; a second passes before each piece. Returns what the client gets."""
        lines = [(name.encode(), value.encode()) for name, value in (request_headers or {}).items()]
        hooks = self.recorder.open(Request("POST", path, lines))
        replaced = None
        if hooks.capture_bytes:
            if body is None:
                hooks.unread("too_large")
            else:
                replaced = hooks.body(body)
        hooks.sent()
        out = b""
        if status:
            if replaced is not None:
                hooks.again(status, headers)  # if so, the second answer is the same
            hooks.head(status, headers)
            for piece in pieces:
                self.clock.now += 1
                out += hooks.chunk(piece)
        out += hooks.release()
        hooks.end(ending, whole=whole)
        await asyncio.sleep(0)
        return out

    def kept(self) -> list[Exchange]:
        return [kept.item for window in self.sampler.flush() for kept in window.kept]

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"driftwatch_{name}", labels) or 0.0


async def test_an_exchange_is_kept_as_it_was_seen() -> None:
    bench = Bench()
    pieces = [b"data: 1\n\n", b"data: 2\n\n", b'data: {"usage": {"completion_tokens": 5}}\n\n']
    headers = {"x-tenant": "a", "x-request-id": "r-7", "x-session-id": "s-1", "authorization": "Bearer secret"}
    assert await bench.exchange(pieces, request_headers=headers) == b"".join(pieces)
    (kept,) = bench.kept()
    assert (kept.id, kept.path, kept.request, kept.status) == ("r-7", CHAT, BODY, 200)
    assert kept.response == b"".join(pieces)
    assert kept.headers == {"content-type": "text/event-stream"}
    assert kept.labels == {"tenant": "a"}
    assert kept.session == "s-1"
    assert (kept.ttft_s, kept.e2e_s) == (1.0, 3.0)
    assert "secret" not in repr(kept)
    assert bench.value("requests_total", segment="tenant=a", outcome="ok") == 1
    assert bench.value("time_to_first_token_seconds_sum", segment="tenant=a") == 1.0
    assert bench.value("time_per_output_token_seconds_sum", segment="tenant=a") == 0.5
    assert bench.value("tap_added_seconds_count") == 1


async def test_without_a_usable_id_each_exchange_gets_its_own() -> None:
    bench = Bench()
    for headers in ({}, {}, {"x-request-id": ""}, {"x-request-id": "x" * 257}):
        await bench.exchange([b"x"], request_headers=dict(headers))
    assert len({kept.id for kept in bench.kept()}) == 4


async def test_an_id_that_comes_again_is_made_unique() -> None:
    bench = Bench()
    for _ in range(3):
        await bench.exchange([b"x"], request_headers={"x-request-id": "r" * 250})
    ids = [kept.id for kept in bench.kept()]
    assert ids[0] == "r" * 250
    assert len(set(ids)) == 3
    assert all(len(id) <= 256 for id in ids)


async def test_bodies_held_for_recording_are_bounded_over_all_exchanges() -> None:
    bench = Bench(memory=3 * (len(BODY) + 100))
    for _ in range(4):
        assert await bench.exchange([b"x" * 100]) == b"x" * 100
    assert bench.value("dropped_total", reason="memory") == 1
    assert bench.memory.left == 0
    assert len(bench.kept()) == 3
    gc.collect()
    assert bench.memory.left == 3 * (len(BODY) + 100), "what is read gives its room back"
    await bench.exchange([b"x" * 2000])
    await bench.exchange([b"x"], status=500)
    assert bench.value("dropped_total", reason="too_large") == 1
    assert bench.memory.left == 3 * (len(BODY) + 100)


async def test_an_error_under_status_200_is_the_engines() -> None:
    bench = Bench()
    await bench.exchange([b'data: {"id": 1}\n\n', b'data: {"error": {"message": "m"}}\n\n', b"data: [DONE]\n\n"])
    assert bench.value("requests_total", segment="tenant=none", outcome="engine_error") == 1
    assert bench.kept() == []


async def test_a_comment_is_no_first_token() -> None:
    bench = Bench()
    await bench.exchange([b": keep-alive\n\n", b": keep-alive\n\n", b"data: 1\n\n"])
    (kept,) = bench.kept()
    assert kept.ttft_s == 3.0


async def test_chunks_are_not_taken_for_tokens() -> None:
    bench = Bench()
    text = b'data: {"content": "\\"completion_tokens\\": 5"}\n\n'
    await bench.exchange([text, text])
    assert bench.value("time_per_output_token_seconds_count", segment="tenant=none") == 0


async def test_a_plain_answer_has_no_time_to_first_token() -> None:
    bench = Bench()
    await bench.exchange([b"{}"], headers=[(b"content-type", b"application/json")])
    (kept,) = bench.kept()
    assert (kept.ttft_s, kept.e2e_s) == (None, 1.0)


@pytest.mark.parametrize(
    ("ending", "status", "outcome"),
    [
        ("complete", 200, "ok"),
        ("complete", 302, "ok"),
        ("complete", 404, "client_error"),
        ("complete", 503, "engine_error"),
        ("broken", 200, "engine_error"),
        ("broken", 0, "engine_error"),
        ("aborted", 200, "aborted"),
        ("aborted", 0, "aborted"),
        ("unreachable", 0, "unreachable"),
        ("refused", 0, "client_error"),
    ],
)
async def test_outcomes(ending: Ending, status: int, outcome: str) -> None:
    assert outcome_of(ending, status) == outcome
    bench = Bench()
    await bench.exchange([b"x"], ending=ending, status=status)
    assert bench.value("requests_total", segment="tenant=none", outcome=outcome) == 1
    assert len(bench.kept()) == (ending == "complete" and status == 200)


async def test_a_client_that_leaves_at_the_last_event_has_got_all() -> None:
    bench = Bench()
    await bench.exchange([b"data: 1\n\n", b"data: [DONE]\n\n"], ending="aborted")
    assert bench.value("requests_total", segment="tenant=none", outcome="ok") == 1
    assert len(bench.kept()) == 1


async def test_a_large_stream_that_its_client_leaves_at_the_last_event_is_ok_too() -> None:
    bench = Bench(capture_bytes=1000)
    await bench.exchange([b"data: %b\n\n" % (b"x" * 900)] * 3 + [b"data: [DO", b"NE]\n\n"], ending="aborted")
    await bench.exchange([b"data: %b\n\n" % (b"x" * 900)] * 3 + [b'data: {"error": {}}\n\n', b"data: [DONE]\n\n"])
    assert bench.value("requests_total", segment="tenant=none", outcome="ok") == 1
    assert bench.value("requests_total", segment="tenant=none", outcome="engine_error") == 1
    assert bench.value("dropped_total", reason="too_large") == 1
    assert bench.memory.left == 1_000_000


async def test_what_was_not_seen_whole_is_counted_by_how_it_ended_and_not_kept() -> None:
    bench = Bench()
    await bench.exchange([b"x"], whole=False)
    await bench.exchange([b"x"], whole=False, path="/v1/embeddings")
    assert bench.value("requests_total", segment="tenant=none", outcome="ok") == 1
    assert bench.value("requests_total", segment="unrecorded", outcome="ok") == 1
    assert bench.kept() == []


async def test_without_room_nothing_is_asked_for() -> None:
    bench = Bench("vllm", memory=10)
    hooks = bench.recorder.open(Request("POST", CHAT, []))
    assert hooks.body(BODY) is None
    await bench.exchange([b"x"])
    assert bench.value("dropped_total", reason="memory") == 1
    assert bench.memory.left == 10


async def test_a_request_that_is_large_to_rewrite_goes_as_it_is() -> None:
    bench = Bench("vllm", capture_bytes=3_000_000, memory=10_000_000)
    large = json.dumps({"messages": [{"role": "user", "content": "x" * ASKED_BYTES}]}).encode()
    assert bench.recorder.open(Request("POST", CHAT, [])).body(large) is None
    assert bench.value("not_asked_total") == 1
    await bench.exchange([b"{}"], body=large)
    assert [kept.request for kept in bench.kept()] == [large]


async def test_other_routes_are_counted_and_not_kept() -> None:
    bench = Bench()
    assert await bench.exchange([b"x"], path="/v1/embeddings") == b"x"
    assert bench.value("requests_total", segment="unrecorded", outcome="ok") == 1
    assert bench.kept() == []


@pytest.mark.parametrize(("body", "piece"), [(None, b"x"), (BODY, b"x" * 2000)])
async def test_what_is_too_large_is_relayed_and_counted(body: bytes | None, piece: bytes) -> None:
    bench = Bench()
    assert await bench.exchange([piece, b"end"], body=body) == piece + b"end"
    assert bench.value("dropped_total", reason="too_large") == 1
    assert bench.value("requests_total", segment="tenant=none", outcome="ok") == 1
    assert bench.kept() == []


@pytest.mark.parametrize(
    ("part", "method", "segment"),
    [("segments", "of", "other"), ("sampler", "ticket", "tenant=none"), ("sampler", "add", "tenant=none")],
)
async def test_it_fails_open(part: str, method: str, segment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("broken on purpose")

    bench = Bench("vllm")
    monkeypatch.setattr(getattr(bench.recorder, part), method, fail)
    assert await bench.exchange([b"a", b"b"]) == b"ab"
    assert bench.value("dropped_total", reason="recorder_error") == 1
    assert bench.value("requests_total", segment=segment, outcome="ok") == 1
    assert bench.kept() == []


USAGE = b'data: {"choices":[],"usage":{"completion_tokens":5}}\n\n'


def busy(bench: Bench) -> None:
    """A hundred exchanges came in the window before this one: at most 22 in 100 are admitted now."""
    for _ in range(100):
        bench.sampler.add("tenant=none", bench.sampler.ticket("tenant=none", bench.clock()), None, bench.clock())
    bench.clock.now += 15
    assert bench.sampler.close(bench.clock())[0].seen == 100


async def test_what_cannot_be_kept_is_not_asked_not_copied_and_counted() -> None:
    draws = iter([0.5] * 100 + [0.22, 0.21])
    bench = Bench("vllm", draw=draws.__next__)
    busy(bench)
    hooks = bench.recorder.open(Request("POST", CHAT, []))
    assert hooks.body(BODY) is None
    hooks.sent()
    assert hooks.head(200, JSON) is False
    event = b'data: {"choices":[{"delta":{"content":"a"},"token_ids":[1]}]}\n\n'
    for piece in (b": keep-alive\n\n", event, USAGE):
        bench.clock.now += 1
        assert hooks.chunk(piece) == piece
    assert hooks.release() == b""
    assert bench.memory.left == 1_000_000
    hooks.end("complete", whole=True)
    await asyncio.sleep(0)
    assert bench.value("end_to_end_seconds_sum", segment="tenant=none") == 3.0
    assert bench.recorder.open(Request("POST", CHAT, [])).body(BODY) is not None, "0.21 is below the limit"
    (window,) = bench.sampler.flush()
    assert (window.seen, window.kept, window.not_chosen) == (1, [], 1)


async def test_of_what_cannot_be_kept_latency_and_outcome_are_known_but_for_the_time_per_token() -> None:
    bench = Bench("vllm", draw=lambda: 0.99)
    busy(bench)
    for pieces, body, ending in (
        ([b"x" * 5000], None, "complete"),
        ([b": keep-alive\n\n", b"data: 1\n\n", USAGE], BODY, "complete"),
        ([b"data: 1\n\n", b"data: [DO", b"NE]\n\n"], BODY, "aborted"),
        ([b"data: 1\n\n", b'data: {"error": {}}\n\n', b"data: [DONE]\n\n"], BODY, "complete"),
    ):
        bench.clock.now = 115.0
        await bench.exchange(pieces, body=body, ending=ending)  # type: ignore[arg-type]
    assert bench.value("time_to_first_token_seconds_sum", segment="tenant=none") == 0.0 + 2.0 + 1.0
    assert bench.value("time_per_output_token_seconds_count", segment="tenant=none") == 0
    assert bench.value("requests_total", segment="tenant=none", outcome="ok") == 3
    assert bench.value("requests_total", segment="tenant=none", outcome="engine_error") == 1
    assert bench.value("dropped_total", reason="too_large") == 0
    (window,) = bench.sampler.flush()
    assert (window.seen, window.lost, window.kept) == (3, 0, [])


async def test_copies_that_were_lost_are_no_samples_that_were_not_chosen() -> None:
    bench = Bench()
    await bench.exchange([b"x"])
    await bench.exchange([b"x" * 2000])
    await bench.exchange([b"x"], whole=False)
    (window,) = bench.sampler.flush()
    assert (window.seen, window.lost, window.not_chosen) == (3, 2, 0)
    assert [kept.weight for kept in window.kept] == [1.0]
    assert bench.value("dropped_total", reason="too_large") == 1


async def test_only_vllm_is_asked_for_more() -> None:
    request = Request("POST", CHAT, [(b"content-length", b"1"), (b"accept-encoding", b"gzip"), (b"x-a", b"b")])
    assert Bench("openai").recorder.open(request).body(BODY) is None
    replaced = Bench("vllm").recorder.open(request).body(BODY)
    assert replaced is not None
    body, headers = replaced
    assert json.loads(body)["return_token_ids"] is True
    length = b"%d" % len(body)
    assert headers == [(b"content-length", length), (b"accept-encoding", b"identity"), (b"x-a", b"b")]


async def test_a_head_waits_if_its_length_may_change() -> None:
    for kind, headers, held in (("vllm", JSON, True), ("openai", JSON, False), ("vllm", STREAM, False)):
        hooks = Bench(kind).recorder.open(Request("POST", CHAT, []))  # type: ignore[arg-type]
        if hooks.body(BODY) is not None:
            assert not hooks.again(200, headers)
        assert hooks.head(200, headers) is held


async def test_the_client_gets_the_stripped_answer_and_the_record_the_whole() -> None:
    bench = Bench("vllm")
    event = b'data: {"choices":[{"delta":{"content":"a"},"token_ids":[1]}]}\n\n'
    out = await bench.exchange([event])
    assert out == event.replace(b"[1]", b"null")
    assert bench.kept()[0].response == event


GZIP = (b"content-encoding", b"gzip")


@pytest.mark.parametrize(
    ("status", "headers", "again"),
    [
        (200, STREAM, False),
        (200, JSON, False),
        (200, [*STREAM, GZIP], True),
        (200, [*JSON, GZIP], True),
        (200, [(b"content-type", b"text/plain")], True),
        (200, [], True),
        (400, JSON, True),
        (413, JSON, True),
        (422, [*JSON, GZIP], True),
        (401, JSON, False),
        (404, JSON, False),
        (429, JSON, False),
        (500, STREAM, False),
        (503, [], False),
    ],
)
async def test_an_answer_that_may_show_what_was_asked_is_asked_for_again(
    status: int, headers: list[tuple[bytes, bytes]], again: bool
) -> None:
    bench = Bench("vllm")
    hooks = bench.recorder.open(Request("POST", CHAT, []))
    assert hooks.body(BODY) is not None
    hooks.sent()
    assert hooks.again(status, headers) is again
    event = b'data: {"choices":[{"delta":{"content":"a"},"token_ids":[1]}]}\n\n'
    hooks.head(status, headers)
    stripped = status == 200 and not again
    assert (hooks.chunk(event) + hooks.release() == event) is not stripped
    hooks.end("complete", whole=True)
    asked = bench.recorder.open(Request("POST", CHAT, [])).body(BODY) is not None
    assert asked is not (again and status == 200), "such an engine is asked no more"


@pytest.mark.parametrize(("second", "asked"), [(200, False), (400, True), (503, True)])
async def test_an_engine_that_takes_a_request_only_unasked_is_asked_no_more(second: int, asked: bool) -> None:
    bench = Bench("vllm")
    hooks = bench.recorder.open(Request("POST", CHAT, []))
    hooks.body(BODY)
    assert hooks.again(422, JSON)
    hooks.head(second, JSON)
    assert hooks.chunk(b'{"token_ids": [1]}') == b'{"token_ids": [1]}', "an answer to the client's own request"
    assert (bench.recorder.open(Request("POST", CHAT, [])).body(BODY) is not None) is asked


async def test_where_it_cannot_be_found_out_whether_an_answer_can_be_shown_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("broken on purpose")

    bench = Bench("vllm")
    monkeypatch.setattr(bench.recorder.asking, "taken_out", fail)
    hooks = bench.recorder.open(Request("POST", CHAT, []))
    hooks.body(BODY)
    assert hooks.again(200, STREAM)
    assert bench.value("dropped_total", reason="recorder_error") == 1


async def test_the_first_bytes_of_a_compressed_stream_are_its_first_token() -> None:
    bench = Bench()
    await bench.exchange([b"\x1f\x8b\x08", b"\x00\x01"], headers=[*STREAM, GZIP])
    (kept,) = bench.kept()
    assert (kept.ttft_s, kept.e2e_s) == (1.0, 2.0)


def test_every_reason_is_there_from_the_start() -> None:
    metrics = Metrics()
    assert all(metrics.registry.get_sample_value("driftwatch_dropped_total", {"reason": r}) == 0 for r in DROP_REASONS)


async def test_an_sglang_is_asked_by_headers_and_its_ids_are_counted_for_the_latency() -> None:
    bench = Bench("sglang", capture_bytes=10_000)
    hooks = bench.recorder.open(Request("POST", CHAT, [(b"host", b"h"), (b"x-sglext-return-input-ids", b"0")]))
    replaced = hooks.body(BODY)
    assert replaced is not None
    body, headers = replaced
    assert body == BODY
    assert dict(headers)[b"x-sglext-return-output-ids"] == b"1"
    assert [value for name, value in headers if name == b"x-sglext-return-input-ids"] == [b"1"]
    last = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}
    ids = {"choices": [], "sglext": {"input_ids": [1], "output_ids": [[5, 6, 7]]}}
    pieces = [f"data: {json.dumps(one)}\n\n".encode() for one in (last, ids)]
    assert await bench.exchange([*pieces, b"data: [DONE]\n\n"]) == pieces[0] + b"data: [DONE]\n\n"
    (sample,) = [
        one.value
        for family in bench.metrics.registry.collect()
        for one in family.samples
        if one.name == "driftwatch_time_per_output_token_seconds_sum"
    ]
    assert sample == 1.0, "two seconds behind the first bytes, for two tokens behind the first"


async def test_routes_are_those_of_the_engine() -> None:
    for kind, recorded in (("sglang", 1), ("vllm", 0)):
        bench = Bench(kind, capture_bytes=10_000)  # type: ignore[arg-type]
        await bench.exchange([b"{}"], path="/generate", headers=JSON, body=b"{}")
        assert len(bench.kept()) == recorded


def buckets(metrics: Metrics, name: str) -> list[float]:
    histogram = {"ttft": metrics.time_to_first_token, "tpot": metrics.time_per_output_token, "e2e": metrics.end_to_end}
    found = histogram[name].labels("x")._upper_bounds
    return [float(edge) for edge in found[:-1]]


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("ttft", [0.1, 0.2, 0.25, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0]),
        ("tpot", [0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1]),
        ("e2e", [1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0]),
    ],
)
def test_buckets_resolve_a_p99_near_the_limits_that_people_set(name: str, limits: list[float]) -> None:
    edges = buckets(Metrics(), name)
    assert set(limits) <= set(edges)
    for limit in limits:
        at = edges.index(limit)
        assert edges[at + 1] / limit < 1.35
        assert limit / edges[at - 1] < 1.35


async def test_the_end_to_end_latency_of_plain_answers_too() -> None:
    bench = Bench()
    await bench.exchange([b"{", b"}"], headers=JSON)
    found = [
        one
        for family in bench.metrics.registry.collect()
        for one in family.samples
        if one.name == "driftwatch_end_to_end_seconds_sum"
    ]
    assert [one.value for one in found] == [2.0]


async def test_an_answer_of_another_engine_is_not_stamped_with_the_facts_of_the_first() -> None:
    bench = Bench("vllm", capture_bytes=10_000)
    probe = bench.recorder.probe
    probe.learn({"kv_cache_dtype": "fp8"})
    for fingerprint in (b"vllm-1-a", b"vllm-1-a", b"vllm-2-b"):
        answer = b'{"choices": [], "system_fingerprint": "%b"}' % fingerprint
        await bench.exchange([answer], headers=JSON, body=b'{"messages": [], "n": 2}')
    stamped = [kept.deployment for kept in bench.kept()]
    known = {"engine": "vllm", "kv_cache_dtype": "fp8"}
    assert (len(stamped), stamped.count(known), stamped.count({"engine": "vllm"})) == (3, 2, 1)
    probe.learn({"kv_cache_dtype": "fp8"})
    await bench.exchange([], ending="unreachable", status=0)
    assert probe.deployment == {"engine": "vllm"}
