"""What the relay tells of each exchange, and may be told in return. All that the relay knows of the rest of the tap."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, Protocol

from driftwatch.tap.asgi import Headers
from driftwatch.tap.memory import Memory

logger = logging.getLogger(__name__)

Ending = Literal["complete", "aborted", "broken", "refused", "unreachable"]
"""How an exchange ended: in full, by the client's leaving, by the engine's breaking off, by the tap because the request
was malformed, or before it could begin."""

Unread = Literal["too_large", "memory"]


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

        0: nothing is watched but the head and the end; ``body``, ``unread`` and ``chunk`` are not called.
        """

    def body(self, data: bytes) -> tuple[bytes, Headers] | None:
        """The request's body. Returns another body and the headers to go with it, or None.

        The answer to a replaced body is framed anew; any other passes as it is, whatever ``chunk`` returns. A body
        that the client kept back until the engine asked for it has gone on when it is given: it cannot be replaced.
        """

    def unread(self, reason: Unread) -> None:
        """In place of ``body``: it was too large, or there was no room for it."""

    def sent(self) -> None:
        """The request's head has gone to the engine."""

    def again(self, status: int, headers: Headers) -> bool:
        """The head of the answer to a replaced request. True if its client must not see that answer: the connection is
        then closed, the request made once more as the client sent it, and its answer passes as it is."""

    def head(self, status: int, headers: Headers) -> bool:
        """The answer's head. True if the number of bytes behind it may change: it never grows."""

    def chunk(self, data: bytes) -> bytes:
        """Bytes of the answer's body, without its framing. Returns what goes to the client now."""

    def release(self) -> bytes:
        """What was still held back, before the end or where a hook has failed; nothing is changed any more."""

    def end(self, ending: Ending, *, whole: bool) -> None:
        """The exchange is over; called exactly once. ``whole``: no hook has failed, so that all of it was seen."""


class Watcher(Protocol):
    """What watches a relay."""

    @property
    def memory(self) -> Memory:
        """Room for what the relay holds for hooks."""

    def open(self, request: Request) -> Hooks:
        """Called for every request when its head has come."""

    def fault(self) -> None:
        """A hook has raised."""

    def refused(self) -> None:
        """A request was refused whose head could not be read: no hooks were opened."""


class Guard:
    """Calls hooks for the relay. What a hook raises is counted and ends there; its exchange goes on without it."""

    __slots__ = ("_hooks", "_released", "_watcher", "capture_bytes", "failed")

    def __init__(self, watcher: Watcher, request: Request) -> None:
        self._watcher = watcher
        self._hooks: Hooks | None = None
        self._released = False
        self.capture_bytes = 0
        self.failed = False
        """A hook has raised: answers are no longer changed."""
        try:
            self._hooks = watcher.open(request)
            self.capture_bytes = self._hooks.capture_bytes
        except Exception:
            self._failure("open")

    def body(self, data: bytes) -> tuple[bytes, Headers] | None:
        if self._hooks is None or self.failed:
            return None
        try:
            return self._hooks.body(data)
        except Exception:
            self._failure("body")
            return None

    def unread(self, reason: Unread) -> None:
        if self._hooks is None or self.failed:
            return
        try:
            self._hooks.unread(reason)
        except Exception:
            self._failure("unread")

    def sent(self) -> None:
        if self._hooks is None or self.failed:
            return
        try:
            self._hooks.sent()
        except Exception:
            self._failure("sent")

    def again(self, status: int, headers: Headers) -> bool:
        """True as well where a hook has failed: nobody is there to change the answer back."""
        if self._hooks is None or self.failed:
            return True
        try:
            return self._hooks.again(status, headers)
        except Exception:
            self._failure("again")
            return True

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
            return self.release() + data  # what the hook had held back comes first

    def release(self) -> bytes:
        if self._hooks is None or self._released:
            return b""
        self._released = True
        try:
            return self._hooks.release()
        except Exception:
            self._failure("release")
            return b""

    def end(self, ending: Ending) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is None:
            return
        try:
            hooks.end(ending, whole=not self.failed)
        except Exception:
            self._failure("end")

    def _failure(self, hook: str) -> None:
        self.failed = True
        logger.exception("recording failed in %s, the exchange goes on", hook)
        try:
            self._watcher.fault()
        except Exception:
            logger.exception("the failure could not be counted")
