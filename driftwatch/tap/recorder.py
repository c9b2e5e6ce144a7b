"""Watches exchanges for the relay: counts and times all, and hands those that can be sampled to the sampler.

It fails open: whatever goes wrong here is counted, and the exchange goes on untouched.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from datetime import UTC, datetime

from driftwatch.tap import glance
from driftwatch.tap.asgi import Headers
from driftwatch.tap.asking import REFUSALS, Asking, headers_for
from driftwatch.tap.capture import Capture
from driftwatch.tap.failopen import FailOpen
from driftwatch.tap.hooks import Ending, Hooks, Request, Unread
from driftwatch.tap.ids import LONGEST, Ids
from driftwatch.tap.memory import Memory
from driftwatch.tap.metrics import UNRECORDED, Metrics, outcome_of
from driftwatch.tap.probe import Probe
from driftwatch.tap.sampler import Sampler, Ticket
from driftwatch.tap.segments import OTHER, Segments
from driftwatch.wire import dialects, openai
from driftwatch.wire.exchange import Exchange, media_type
from driftwatch.wire.injection import Injected
from driftwatch.wire.strip import Stripper


class Recorder:
    """Gives the relay its hooks, one set for each exchange."""

    def __init__(
        self,
        capture_bytes: int,
        segments: Segments,
        sampler: Sampler[Exchange],
        probe: Probe,
        metrics: Metrics,
        memory: Memory,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capture_bytes = capture_bytes
        self.segments = segments
        self.sampler = sampler
        self.probe = probe
        self.metrics = metrics
        self.memory = memory
        self.clock = clock
        self.ids = Ids()
        self.asking = Asking(probe, metrics, clock)

    def open(self, request: Request) -> Hooks:
        if request.method == "POST" and request.path in dialects.of(self.probe.kind).routes:
            return Recording(self, request)
        return Counting(self)

    def fault(self) -> None:
        self.metrics.drop("recorder_error")

    def refused(self) -> None:
        self.metrics.request(UNRECORDED, outcome_of("refused", 0))


class Counting:
    """Hooks of a route that is relayed only."""

    capture_bytes = 0

    def __init__(self, recorder: Recorder) -> None:
        self._tap = recorder
        self._started = recorder.clock()
        self._status = 0

    def body(self, data: bytes) -> None: ...

    def unread(self, reason: Unread) -> None: ...

    def sent(self) -> None:
        self._tap.metrics.added.observe(self._tap.clock() - self._started)

    def again(self, status: int, headers: Headers) -> bool:
        return False

    def head(self, status: int, headers: Headers) -> bool:
        self._status = status
        return False

    def chunk(self, data: bytes) -> bytes:
        return data

    def release(self) -> bytes:
        return b""

    def end(self, ending: Ending, *, whole: bool) -> None:
        self._tap.metrics.request(UNRECORDED, outcome_of(ending, self._status))


class Recording:
    """Hooks of a route that is recorded: the tap's own times of each exchange, and a copy of those admitted."""

    def __init__(self, recorder: Recorder, request: Request) -> None:
        self._tap = recorder
        self._head = request
        self._started_at = datetime.now(UTC)
        self._started = self._ready = recorder.clock()
        self._first: float | None = None
        self._ended = self._started
        self._segment: str | None = None
        """None until the request's body is known."""
        self._labels: dict[str, str] = {}
        self._ticket: Ticket | None = None
        self._copy: Capture | None = None
        """None: it is only relayed and counted."""
        self._injected: Injected | None = None
        self._stripper: Stripper | None = None
        self._refused = 0
        """Status of an answer that its client did not get: the request was made again."""
        self._status = 0
        self._headers: dict[str, str] = {}
        self._last = b"", b""
        """The last two pieces of the answer: they say how it ended."""
        self._fail_open = FailOpen(recorder.metrics)

    @property
    def capture_bytes(self) -> int:
        return self._tap.capture_bytes

    def body(self, data: bytes) -> tuple[bytes, Headers] | None:
        self._ready = self._tap.clock()
        self._arrive(data, len(data))
        copy = self._copy
        if copy is None:
            return None
        copy.begin(data)
        with self._fail_open:
            self._injected = self._tap.asking.ask(self._head, data) if copy.lost is None else None
        if self._injected is None:
            return None
        return self._injected.body, headers_for(self._head.headers, self._injected)

    def unread(self, reason: Unread) -> None:
        self._ready = self._tap.clock()
        self._arrive(None, self._stated_size())
        if self._copy is not None:
            self._copy.lose(reason)

    def _arrive(self, body: bytes | None, size: int | None) -> None:
        """Find whose it is, and whether it may be kept."""
        tap = self._tap
        self._segment = OTHER
        with self._fail_open:
            self._segment, self._labels = tap.segments.of(self._head.headers, body, size)
            self._ticket = tap.sampler.ticket(self._segment, self._ready)
            if self._ticket.admitted:
                self._copy = Capture(tap.capture_bytes, tap.memory)

    def sent(self) -> None:
        self._tap.metrics.added.observe(self._tap.clock() - self._ready)

    def again(self, status: int, headers: Headers) -> bool:
        asked, copy, self._injected = self._injected, self._copy, None
        if status == 200 and asked is not None and copy is not None:
            with self._fail_open:
                self._stripper = self._tap.asking.taken_out(asked, _described(headers), copy.share.take)
            return self._stripper is None
        if status in REFUSALS:
            self._refused = status
        return status in REFUSALS

    def head(self, status: int, headers: Headers) -> bool:
        self._status = status
        with self._fail_open:
            self._headers = _described(headers)
            if self._refused and status < 300:
                self._tap.asking.refused(self._refused)
        return self._stripper is not None and any(name == b"content-length" for name, _ in headers)

    def chunk(self, data: bytes) -> bytes:
        # A comment that keeps the connection alive is no token.
        if self._first is None and (not self._legible or b"data:" in self._last[1] + data):
            self._first = self._tap.clock()
        self._last = self._last[1], data
        if self._copy is not None:
            self._copy.add(data)
        return self._stripper.feed(data) if self._stripper else data

    def release(self) -> bytes:
        return self._stripper.close() if self._stripper else b""

    def end(self, ending: Ending, *, whole: bool) -> None:
        self._ended = self._tap.clock()
        # Behind the client's last bytes, which go out before the loop comes to it.
        asyncio.get_running_loop().call_soon(self._settle, ending, whole)

    def _settle(self, ending: Ending, whole: bool) -> None:
        """Count the exchange, and offer it to the sampler if it can be sampled."""
        last = b"".join(self._last)
        if ending == "aborted" and glance.has_ended(last):
            ending = "complete"
        outcome = outcome_of(ending, self._status)
        if outcome == "ok" and self._streamed and glance.has_failed(last):
            outcome = "engine_error"
        if self._segment is None:  # its body never came
            self._arrive(None, self._stated_size())
        self._tap.metrics.request(self._segment or OTHER, outcome)
        with self._fail_open:
            if outcome == "unreachable":
                self._tap.probe.doubt()
            # Status 200 and not merely a good one: others carry no completion.
            if outcome == "ok" and self._status == 200 and self._segment is not None:
                self._offer(self._segment, whole)
        if self._copy is not None:
            self._copy.share.clear()  # unless the sampler has it now

    def _offer(self, segment: str, whole: bool) -> None:
        """``whole``: all of it was seen."""
        tap, copy, ticket = self._tap, self._copy, self._ticket
        e2e_s = self._ended - self._started
        # A plain answer comes in one piece, when everything has been generated: its first bytes say nothing.
        ttft_s = self._first - self._started if self._streamed and self._first is not None else None
        if whole:
            tap.metrics.end_to_end.labels(segment).observe(e2e_s)
            if ttft_s is not None:
                tap.metrics.time_to_first_token.labels(segment).observe(ttft_s)
            if copy is not None and copy.lost is not None:
                tap.metrics.drop(copy.lost)
        exchange = self._exchange(segment, copy, ttft_s, e2e_s) if whole and copy is not None else None
        if ticket is not None:
            tap.sampler.add(segment, ticket, exchange, tap.clock())

    def _exchange(self, segment: str, copy: Capture, ttft_s: float | None, e2e_s: float) -> Exchange | None:
        """What was copied; None if it was lost."""
        if copy.request is None:
            return None
        tap, response = self._tap, copy.answer
        tokens = None if glance.asks_for_several(copy.request) else glance.tokens(response)
        tpot_s = openai.time_per_token(ttft_s, e2e_s, tokens)
        if tpot_s is not None:
            tap.metrics.time_per_output_token.labels(segment).observe(tpot_s)
        exchange = Exchange(
            id=tap.ids.unique(self._header(b"x-request-id")),
            path=self._head.path,
            request=copy.request,
            status=self._status,
            headers=self._headers,
            response=response,
            labels=self._labels,
            session=self._header(b"x-session-id"),
            started_at=self._started_at,
            ttft_s=ttft_s,
            e2e_s=e2e_s,
            deployment=tap.probe.facts(glance.fingerprint(response)),
            no_train=self._forbids_training(),
        )
        weakref.finalize(exchange, copy.share.clear)
        self._copy = None  # its memory is the exchange's now
        return exchange

    @property
    def _streamed(self) -> bool:
        return media_type(self._headers) == "text/event-stream"

    @property
    def _legible(self) -> bool:
        """Whether events can be told from comments."""
        return self._streamed and "content-encoding" not in self._headers

    def _forbids_training(self) -> bool:
        """Any such header but a clear no: a doubtful one is taken for the client's wish to be left out."""
        values = [value for name, value in self._head.headers if name == b"x-driftwatch-no-train"]
        return any(value.strip().lower() not in (b"0", b"false") for value in values)

    def _stated_size(self) -> int | None:
        stated = self._header(b"content-length")
        return int(stated) if stated is not None and stated.isdecimal() else None

    def _header(self, name: bytes) -> str | None:
        """A header's value; None if it is missing, empty, or too long to be an id."""
        value = dict(self._head.headers).get(name, b"").decode(errors="replace")
        return value if 0 < len(value) <= LONGEST else None


def _described(headers: Headers) -> dict[str, str]:
    """What an answer's headers say of its body."""
    return {
        name.decode(): value.decode("latin-1")
        for name, value in headers
        if name in (b"content-type", b"content-encoding")
    }
