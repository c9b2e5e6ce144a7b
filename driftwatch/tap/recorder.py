"""Watches exchanges for the relay: counts and times all, and hands those that can be sampled to the sampler.

It fails open: whatever goes wrong here is counted, and the exchange goes on untouched.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from driftwatch.tap.asgi import Headers
from driftwatch.tap.hooks import Ending, Hooks, Request
from driftwatch.tap.memory import Memory
from driftwatch.tap.metrics import UNRECORDED, Metrics, Outcome, TapReason
from driftwatch.tap.probe import Probe
from driftwatch.tap.sampler import Sampler
from driftwatch.tap.segments import OTHER, Segments
from driftwatch.wire import dialects, openai
from driftwatch.wire.exchange import Exchange, media_type
from driftwatch.wire.injection import Injected
from driftwatch.wire.strip import Stripper, stripper

logger = logging.getLogger(__name__)

# The last count in an answer is its final usage. Inside a string the quotes would be escaped, so text cannot fake it.
_TOKENS = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)')
_COUNTS = (b'"completion_tokens"', b'"output_tokens"')
_FINGERPRINT = re.compile(rb'"system_fingerprint"\s*:\s*"([^"\\]+)"')
_SGLEXT_IDS = re.compile(rb'"output_ids"\s*:\s*\[\[([\d,\s]+)\]\]')
_ERROR = re.compile(rb'^data:\s*\{\s*"error"', re.MULTILINE)
_SEVERAL = re.compile(rb'"(?:n|best_of)"\s*:\s*(?:[2-9]|\d\d)')
_HUGE = re.compile(rb"\d{19}")
"""Perhaps an integer that would not survive being read and written."""
_ID_LENGTH = 256


class Ids:
    """Ids of records: the client's own, made unique where it gives one again, or a new one."""

    REMEMBERED = 10_000

    def __init__(self) -> None:
        self._seen: OrderedDict[str, None] = OrderedDict()

    def unique(self, given: str | None) -> str:
        """Otherwise a constant id, or that of a retry, would pass for a sample that is already stored."""
        if given is None:
            return uuid.uuid4().hex
        again = given in self._seen
        self._seen[given] = None
        self._seen.move_to_end(given)
        if len(self._seen) > self.REMEMBERED:
            self._seen.popitem(last=False)
        return f"{given[: _ID_LENGTH - 33]}-{uuid.uuid4().hex}" if again else given


@dataclass(frozen=True, slots=True)
class Recorder:
    """Gives the relay its hooks, one set for each exchange."""

    capture_bytes: int
    segments: Segments
    sampler: Sampler[Exchange]
    probe: Probe
    metrics: Metrics
    memory: Memory
    ids: Ids = field(default_factory=Ids)
    clock: Callable[[], float] = time.monotonic

    def open(self, request: Request) -> Hooks:
        if request.method == "POST" and request.path in dialects.of(self.probe.kind).routes:
            return Recording(self, request)
        return Counting(self)


class Counting:
    """Hooks of a route that is relayed only."""

    capture_bytes = 0

    def __init__(self, recorder: Recorder) -> None:
        self._tap = recorder
        self._started = recorder.clock()
        self._status = 0

    def body(self, data: bytes | None) -> None:
        return None

    def sent(self) -> None:
        self._tap.metrics.added.observe(self._tap.clock() - self._started)

    def head(self, status: int, headers: Headers) -> bool:
        self._status = status
        return False

    def chunk(self, data: bytes) -> bytes:
        return data

    def end(self, ending: Ending) -> bytes:
        self._tap.metrics.request(UNRECORDED, outcome_of(ending, self._status))
        return b""


class Recording:
    """Hooks of a route that is recorded: a copy of both bodies up to a size, and the tap's own times."""

    def __init__(self, recorder: Recorder, request: Request) -> None:
        self._tap = recorder
        self._head = request
        self._started_at = datetime.now(UTC)
        self._started = self._ready = recorder.clock()
        self._first: float | None = None
        self._ended = self._started
        self._request: bytes | None = None
        self._request_bytes: int | None = None
        self._injected: Injected | None = None
        self._stripper: Stripper | None = None
        self._status = 0
        self._headers: dict[str, str] = {}
        self._chunks: list[bytes] = []
        self._size = 0
        self._held = 0
        self._lost: TapReason | None = None
        """Why this exchange cannot be recorded any more."""
        self._fail_open = _FailOpen(recorder.metrics)

    @property
    def capture_bytes(self) -> int:
        return self._tap.capture_bytes

    def body(self, data: bytes | None) -> tuple[bytes, Headers] | None:
        self._ready = self._tap.clock()
        if data is None:
            self._lose("too_large")
        else:
            self._request_bytes = len(data)
            if self._hold(len(data)):
                self._request = data
        with self._fail_open:
            inject = dialects.of(self._tap.probe.kind).inject
            if data is not None and inject is not None and not self._asked_itself() and not _HUGE.search(data):
                self._injected = inject(self._head.path, data, self._tap.probe.deployment)
        if self._injected is None:
            return None
        return self._injected.body, _headers_for(self._head.headers, self._injected)

    def sent(self) -> None:
        self._tap.metrics.added.observe(self._tap.clock() - self._ready)

    def head(self, status: int, headers: Headers) -> bool:
        self._status = status
        with self._fail_open:
            values = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
            self._headers = {name: values[name] for name in ("content-type", "content-encoding") if name in values}
            if self._injected and status == 200 and values.get("content-encoding", "identity") == "identity":
                self._stripper = stripper(self._injected, media_type(values))
        return self._stripper is not None and any(name == b"content-length" for name, _ in headers)

    def chunk(self, data: bytes) -> bytes:
        # A comment that keeps the connection alive is no token.
        if self._first is None and (not self._streamed or b"data:" in data or b"data:" in b"".join(self._chunks)):
            self._first = self._tap.clock()
        if self._lost is None:
            self._size += len(data)
            if self._size > self._tap.capture_bytes:
                self._lose("too_large")
            elif self._hold(len(data)):
                self._chunks.append(data)
        return self._stripper.feed(data) if self._stripper else data

    def _hold(self, size: int) -> bool:
        """Room for so many more bytes of this exchange; without it the exchange is not recorded."""
        if self._tap.memory.take(size):
            self._held += size
            return True
        self._lose("memory")
        return False

    def _lose(self, reason: TapReason) -> None:
        self._lost = reason
        self._request = None
        self._chunks.clear()
        self._tap.memory.give(self._held)
        self._held = 0

    def end(self, ending: Ending) -> bytes:
        self._ended = self._tap.clock()
        # Behind the client's last bytes, which go out before the loop comes to it.
        asyncio.get_running_loop().call_soon(self._settle, ending)
        return self._stripper.close() if self._stripper else b""

    def _settle(self, ending: Ending) -> None:
        """Count the exchange, and offer it to the sampler if it can be sampled."""
        # Many clients close the connection at this mark, perhaps before the engine's own end has come.
        if ending == "aborted" and b"".join(self._chunks[-2:]).rstrip().endswith(b"data: [DONE]"):
            ending = "complete"
        outcome = outcome_of(ending, self._status)
        if outcome == "ok" and self._streamed and _ERROR.search(b"".join(self._chunks[-2:])):
            outcome = "engine_error"  # under status 200, as it came late
        segment, labels = OTHER, dict[str, str]()
        with self._fail_open:
            segment, labels = self._tap.segments.of(self._head.headers, self._request, self._request_size())
        self._tap.metrics.request(segment, outcome)
        with self._fail_open:
            if outcome == "unreachable":
                self._tap.probe.doubt()
            # Status 200 and not merely a good one: others carry no completion.
            if outcome == "ok" and self._status == 200:
                self._offer(segment, labels)
        self._tap.memory.give(self._held)  # unless the sampler has it now
        self._held = 0

    def _offer(self, segment: str, labels: dict[str, str]) -> None:
        metrics = self._tap.metrics
        e2e_s = self._ended - self._started
        # A plain answer comes in one piece, when everything has been generated: its first bytes say nothing.
        ttft_s = self._first - self._started if self._streamed and self._first is not None else None
        metrics.end_to_end.labels(segment).observe(e2e_s)
        if ttft_s is not None:
            metrics.time_to_first_token.labels(segment).observe(ttft_s)
        if self._request is None:
            metrics.drop(self._lost or "too_large")
            return
        response = b"".join(self._chunks)
        # Usage counts the tokens of all choices together.
        tokens = None if _SEVERAL.search(self._request) else _tokens(response)
        tpot_s = openai.time_per_token(ttft_s, e2e_s, tokens)
        if tpot_s is not None:
            metrics.time_per_output_token.labels(segment).observe(tpot_s)
        exchange = Exchange(
            id=self._tap.ids.unique(self._header(b"x-request-id")),
            path=self._head.path,
            request=self._request,
            status=self._status,
            headers=self._headers,
            response=response,
            labels=labels,
            session=self._header(b"x-session-id"),
            started_at=self._started_at,
            ttft_s=ttft_s,
            e2e_s=e2e_s,
            deployment=self._tap.probe.facts(_fingerprint(response)),
        )
        weakref.finalize(exchange, self._tap.memory.give, self._held)
        self._held = 0
        self._tap.sampler.add(segment, exchange.id, exchange, self._tap.clock())

    @property
    def _streamed(self) -> bool:
        return media_type(self._headers) == "text/event-stream"

    def _asked_itself(self) -> bool:
        """The client asks SGLang for ids by header: what is its own must not be stripped."""
        asked = [value for name, value in self._head.headers if name.startswith(b"x-sglext-")]
        return any(value not in (b"", b"0", b"false") for value in asked)

    def _request_size(self) -> int | None:
        if self._request_bytes is not None:
            return self._request_bytes
        stated = self._header(b"content-length")
        return int(stated) if stated is not None and stated.isdecimal() else None

    def _header(self, name: bytes) -> str | None:
        """A header's value; None if it is missing, empty, or too long to be an id."""
        value = dict(self._head.headers).get(name, b"").decode(errors="replace")
        return value if 0 < len(value) <= _ID_LENGTH else None


class _FailOpen:
    """A ``with`` block that ends at its first exception instead of raising it. The exception is counted."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._metrics.drop("recorder_error")
        logger.error("recording failed, the exchange goes on", exc_info=error)
        return True


def outcome_of(ending: Ending, status: int) -> Outcome:
    """What a request counts as."""
    if ending in ("aborted", "unreachable"):
        return ending
    if ending == "broken" or status >= 500:
        return "engine_error"
    return "client_error" if status >= 400 else "ok"


def _headers_for(headers: Headers, injected: Injected) -> Headers:
    """The headers of a request that was replaced."""
    # A compressed answer could not be stripped again.
    changed = {b"content-length": b"%d" % len(injected.body), b"accept-encoding": b"identity"}
    added = dict(injected.headers)
    lines = [(name, changed.get(name, value)) for name, value in headers if name not in added]
    lines += injected.headers
    chunked = all(name != b"content-length" for name, _ in headers)
    return [*lines, (b"content-length", changed[b"content-length"])] if chunked else lines


def _fingerprint(response: bytes) -> str | None:
    found = _FINGERPRINT.match(response, max(0, response.rfind(b'"system_fingerprint"')))
    return found[1].decode(errors="replace") if found else None


def _tokens(response: bytes) -> int | None:
    """The engine's own count of output tokens: from its usage, else from the ids that SGLang puts behind a stream."""
    start = max(response.rfind(name) for name in _COUNTS)
    if start >= 0 and (found := _TOKENS.match(response, start)):
        return int(found[1])
    ids = _SGLEXT_IDS.search(response, max(0, response.rfind(b'"sglext"')))
    return ids[1].count(b",") + 1 if ids else None
