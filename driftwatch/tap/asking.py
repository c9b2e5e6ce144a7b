"""What the tap asks of the engine on top of what the client asked, and whether it may."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

from driftwatch.tap import glance
from driftwatch.tap.asgi import Headers
from driftwatch.tap.hooks import Request
from driftwatch.tap.metrics import Metrics
from driftwatch.tap.probe import Probe
from driftwatch.wire import dialects
from driftwatch.wire.exchange import media_type
from driftwatch.wire.injection import Injected
from driftwatch.wire.strip import Stripper, stripper

logger = logging.getLogger(__name__)

REFUSALS = frozenset({400, 413, 422})
"""Statuses by which engines say that they do not take a request. Their text may quote what was added to it."""
SIGNED = frozenset(
    {b"content-md5", b"content-digest", b"digest", b"repr-digest", b"signature", b"x-amz-content-sha256"}
)
"""Headers that vouch for the body as it is."""
ASKED_BYTES = 1024 * 1024
"""A larger request is sent on as it is, since reading and writing it would hold up every stream: its sample is
tokenised again later."""
PAUSE_S = 3600.0
"""An engine that must not be asked may be another one later."""


class Asking:
    """Adds to requests what the engine's dialect knows to ask for."""

    def __init__(self, probe: Probe, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._probe = probe
        self._metrics = metrics
        self._clock = clock
        self._stopped_until = -math.inf
        """An answer has shown that this engine must not be asked."""

    def ask(self, request: Request, body: bytes) -> Injected | None:
        """The request that asks for more; None if the engine takes no such, or this one must stay as it is."""
        inject = dialects.of(self._probe.kind).inject
        if inject is None or _must_stay(request.headers) or glance.has_huge_numbers(body):
            return None
        if self._clock() < self._stopped_until or len(body) > ASKED_BYTES:
            self._metrics.not_asked.inc()
            return None
        return inject(request.path, body, self._probe.deployment)

    def taken_out(self, asked: Injected, answer: Mapping[str, str], room: Callable[[int], bool]) -> Stripper | None:
        """What takes out of a good answer with these headers what was asked for; None if nothing can, and then this
        engine is not asked for a while."""
        encoding = answer.get("content-encoding", "").strip().lower()
        found = stripper(asked, media_type(answer), room) if encoding in ("", "identity") else None
        if found is None:
            self._stop(
                f"the engine answers in {encoding} although the tap declined that; let it, or the gateway before it,"
                " honour `accept-encoding: identity`"
                if encoding not in ("", "identity")
                else f"the engine answers with a content-type of {media_type(answer) or 'nothing'}"
            )
        return found

    def refused(self, status: int) -> None:
        """A request was answered with this status, and then taken as its client had sent it."""
        self._stop(f"the engine refuses (status {status}) requests that ask for token ids")

    def _stop(self, reason: str) -> None:
        now = self._clock()
        if now >= self._stopped_until:
            logger.warning("%s: it is not asked for %g s, and samples are tokenised again", reason, PAUSE_S)
        self._stopped_until = now + PAUSE_S


def headers_for(headers: Headers, injected: Injected) -> Headers:
    """The headers of a request that was replaced."""
    # A compressed answer could not be stripped again.
    changed = {b"content-length": b"%d" % len(injected.body), b"accept-encoding": b"identity"}
    added = dict(injected.headers)
    lines = [(name, changed.get(name, value)) for name, value in headers if name not in added]
    lines += injected.headers
    chunked = all(name != b"content-length" for name, _ in headers)
    return [*lines, (b"content-length", changed[b"content-length"])] if chunked else lines


def _must_stay(headers: Headers) -> bool:
    """The client vouches for its body, or asks SGLang for ids by header: what is its own must not be stripped."""
    return any(
        name in SIGNED or (name.startswith(b"x-sglext-") and value not in (b"", b"0", b"false"))
        for name, value in headers
    )
