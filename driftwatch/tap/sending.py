"""A request on its way to the engine: what was read of it, what hooks wait for, and what can be sent a second time."""

from __future__ import annotations

from driftwatch.tap.framing import Chunked, Framing, Length
from driftwatch.tap.hooks import Guard
from driftwatch.tap.http1 import RequestHead

REPLAY_BYTES = 64 * 1024
"""Of a body that is streamed, this much is remembered for a second try."""


class Sending:
    """Follows the request's body. It is ``held`` until the hooks have seen the whole of it, or it is too large."""

    def __init__(self, head: RequestHead, hooks: Guard, prefix: bytes) -> None:
        self._head = head
        self._hooks = hooks
        self._prefix = prefix
        self._framing: Framing = Chunked() if head.chunked else Length(head.length or 0)
        self._content: list[bytes] | None = [] if hooks.capture_bytes else None
        """The body for the hooks; None when they have it, or want none."""
        # A client that waits to be asked for its body gets the engine's answer to that: nothing can be changed then.
        self.held = hooks.capture_bytes > 0 and not head.expects
        self.replaced = False
        self._limit = hooks.capture_bytes if self.held else REPLAY_BYTES
        self._taken = 0
        self._kept: list[bytes] | None = [] if self.held else [head.forward(prefix)]

    @property
    def complete(self) -> bool:
        """It has been read to its end."""
        return self._framing.complete

    @property
    def large(self) -> bool:
        """It is not worth keeping."""
        return self._taken > self._limit and not self.held

    @property
    def repeatable(self) -> bool:
        return self._kept is not None

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """The bytes that belong to it, and those behind it. Raises Malformed."""
        taken = self._framing.take(data, self._content)
        piece, rest = (data, b"") if taken == len(data) else (data[:taken], data[taken:])
        self._taken += taken
        if self._kept is not None:
            self._kept.append(piece)
        if self._content is not None:
            if self._taken > self._hooks.capture_bytes:
                self.show(too_large=True)
            elif self._framing.complete:
                self.show()
        return piece, rest

    def show(self, *, too_large: bool = False) -> None:
        """Give the body to the hooks, if they have not had it; they may replace it if it is held."""
        content, self._content = self._content, None
        if content is None:
            return
        replaced = self._hooks.body(None if too_large else b"".join(content))
        if not self.held:
            return
        self.held = False
        if replaced is not None and not too_large:
            self.replaced = True
            body, headers = replaced
            self._kept = [self._head.forward(self._prefix, headers), body]
        else:
            self._kept = [self._head.forward(self._prefix), *(self._kept or ())]

    def so_far(self) -> bytes:
        """All that a new connection is sent."""
        data = b"".join(self._kept or ())
        if self.large:
            self._kept = None
        return data

    def forget(self) -> None:
        """It need not be sent again."""
        self._kept = None
