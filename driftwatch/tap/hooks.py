"""What the relay tells of each exchange, and may be told in return. All that the relay knows of the rest of the tap."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from driftwatch.tap.asgi import Headers

logger = logging.getLogger(__name__)

Ending = Literal["complete", "aborted", "broken", "unreachable"]
"""How an exchange ended: in full, by the client's leaving, by the engine's breaking off, or before it could begin."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request's head as the client sent it."""

    method: str
    path: str
    headers: Headers


class Hooks(Protocol):
    """What watches one exchange, and may change it. Called in the request path: quick, and never raising."""

    @property
    def capture_bytes(self) -> int:
        """A request body up to this size is read before it is sent on, and given to ``body``.

        0: nothing is watched but the head and the end; neither ``body`` nor ``chunk`` is called.
        """

    def body(self, data: bytes | None) -> tuple[bytes, Headers] | None:
        """The request's body, None if it was too large. Returns another body and the headers to go with it, or None.

        The answer to a replaced body is framed anew; any other passes as it is, whatever ``chunk`` returns. A body
        that the client kept back until the engine asked for it has gone on when it is given: it cannot be replaced.
        """

    def sent(self) -> None:
        """The request's head has gone to the engine."""

    def head(self, status: int, headers: Headers) -> bool:
        """The answer's head. True holds it back until bytes are let through: their number may change.

        If they are let through by ``end`` only, a ``content-length`` is set to their number.
        """

    def chunk(self, data: bytes) -> bytes:
        """Bytes of the answer's body, without its framing. Returns what goes to the client now."""

    def end(self, ending: Ending) -> bytes:
        """The exchange is over; called exactly once. Returns what was still held back."""


Open = Callable[[Request], Hooks]
"""Called for every request when its head has come."""


class Guard:
    """Calls hooks for the relay. What a hook raises is counted and ends there; its exchange goes on without it."""

    __slots__ = ("_fault", "_hooks", "capture_bytes", "failed")

    def __init__(self, open: Open, request: Request, fault: Callable[[], None]) -> None:
        self._fault = fault
        self._hooks: Hooks | None = None
        self.capture_bytes = 0
        self.failed = False
        """A hook has raised: answers are no longer changed."""
        try:
            self._hooks = open(request)
            self.capture_bytes = self._hooks.capture_bytes
        except Exception:
            self._failure("open")

    def body(self, data: bytes | None) -> tuple[bytes, Headers] | None:
        if self._hooks is None or self.failed:
            return None
        try:
            return self._hooks.body(data)
        except Exception:
            self._failure("body")
            return None

    def sent(self) -> None:
        if self._hooks is None or self.failed:
            return
        try:
            self._hooks.sent()
        except Exception:
            self._failure("sent")

    def head(self, status: int, headers: Headers) -> bool:
        if self._hooks is None or self.failed:
            return False
        try:
            return self._hooks.head(status, headers)
        except Exception:
            self._failure("head")
            return False

    def chunk(self, data: bytes) -> bytes:
        if self._hooks is None or self.failed:
            return data
        try:
            return self._hooks.chunk(data)
        except Exception:
            self._failure("chunk")
            # What the hook had held back comes first.
            return self.end("complete") + data

    def end(self, ending: Ending) -> bytes:
        hooks, self._hooks = self._hooks, None
        if hooks is None:
            return b""
        if self.failed and ending == "complete":
            ending = "aborted"  # what was not watched to its end is no whole sample
        try:
            return hooks.end(ending)
        except Exception:
            self._failure("end")
            return b""

    def _failure(self, hook: str) -> None:
        self.failed = True
        logger.exception("recording failed in %s, the exchange goes on", hook)
        try:
            self._fault()
        except Exception:
            logger.exception("the failure could not be counted")
