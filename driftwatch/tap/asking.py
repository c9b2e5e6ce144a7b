"""What the tap asks of the engine on top of what the client asked, and whether it may."""

from __future__ import annotations

import logging

from driftwatch.tap import glance
from driftwatch.tap.asgi import Headers
from driftwatch.tap.hooks import Request
from driftwatch.tap.metrics import Metrics
from driftwatch.tap.probe import Probe
from driftwatch.wire import dialects
from driftwatch.wire.injection import Injected

logger = logging.getLogger(__name__)

ASKED_BYTES = 1024 * 1024
"""A larger request is sent on as it is, since reading and writing it would hold up every stream: its sample is
tokenised again later."""


class Asking:
    """Adds to requests what the engine's dialect knows to ask for."""

    def __init__(self, probe: Probe, metrics: Metrics) -> None:
        self._probe = probe
        self._metrics = metrics
        self._compressed = False
        """An answer came compressed although that was declined: nothing can be taken out of such ones."""

    def ask(self, request: Request, body: bytes) -> Injected | None:
        """The request that asks for more; None if the engine takes no such, or this one must stay as it is."""
        inject = dialects.of(self._probe.kind).inject
        if inject is None or _asks_itself(request.headers) or glance.has_huge_numbers(body):
            return None
        if self._compressed or len(body) > ASKED_BYTES:
            self._metrics.not_asked.inc()
            return None
        return inject(request.path, body, self._probe.deployment)

    def strippable(self, encoding: str) -> bool:
        """Whether what was asked for can be taken out of an answer with this ``content-encoding``. If not, its client
        gets the fields too, and it is the last one: such an engine is not asked again."""
        if encoding.strip().lower() in ("", "identity"):
            return True
        if not self._compressed:
            self._compressed = True
            logger.warning(
                "the engine answers in %s although the tap declined that: it is not asked for token ids any more, and"
                " samples are tokenised again; let it, or the gateway before it, honour `accept-encoding: identity`,"
                " then restart the tap",
                encoding,
            )
        return False


def headers_for(headers: Headers, injected: Injected) -> Headers:
    """The headers of a request that was replaced."""
    # A compressed answer could not be stripped again.
    changed = {b"content-length": b"%d" % len(injected.body), b"accept-encoding": b"identity"}
    added = dict(injected.headers)
    lines = [(name, changed.get(name, value)) for name, value in headers if name not in added]
    lines += injected.headers
    chunked = all(name != b"content-length" for name, _ in headers)
    return [*lines, (b"content-length", changed[b"content-length"])] if chunked else lines


def _asks_itself(headers: Headers) -> bool:
    """The client asks SGLang for ids by header: what is its own must not be stripped."""
    asked = [value for name, value in headers if name.startswith(b"x-sglext-")]
    return any(value not in (b"", b"0", b"false") for value in asked)
