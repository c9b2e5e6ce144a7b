"""A request on its way to the engine: what was read of it, what hooks wait for, and what can be sent a second time."""

from __future__ import annotations

from driftwatch.tap.framing import Chunked, Framing, Length
from driftwatch.tap.hooks import Guard, Unread
from driftwatch.tap.http1 import RequestHead
from driftwatch.tap.memory import Memory, Share

REPLAY_BYTES = 64 * 1024
"""Of a body that is streamed, this much is remembered for a second try."""


class Sending:
    """Follows the request's body. It is ``held`` until the hooks have seen the whole of it, it is too large, or there
    is no room for it."""

    def __init__(self, head: RequestHead, hooks: Guard, prefix: bytes, memory: Memory) -> None:
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
        self._share = Share(memory)
        self._kept: list[bytes] | None = [] if self.held else [head.forward(prefix)]
        self._original: list[bytes] = []
        """What was replaced."""

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
        if self._kept is not None or self._content is not None:
            if self._kept is not None:
                self._kept.append(piece)
            # What it says and how it was framed are the same bytes, unless it is chunked.
            if not self._share.take(taken * (2 if self._head.chunked and self._content is not None else 1)):
                self._limit = -1
                self.skip("memory")
            elif self._content is not None and self._taken > self._hooks.capture_bytes:
                self.skip("too_large")
        if self._framing.complete:
            self.show()
        return piece, rest

    def show(self) -> None:
        """Give the body to the hooks, if they have not had it; they may replace it if it is held."""
        content, self._content = self._content, None
        if content is None:
            return
        replaced = self._hooks.body(b"".join(content))
        if self.held:
            self._let_go()
            if replaced is not None:
                self.replaced = True
                body, headers = replaced
                self._original = self._kept or []
                self._kept = [self._head.forward(self._prefix, headers), body]

    def skip(self, reason: Unread) -> None:
        """The hooks do not get the body, if they have not had it."""
        content, self._content = self._content, None
        if content is not None:
            self._hooks.unread(reason)
        if self.held:
            self._let_go()

    def _let_go(self) -> None:
        self.held = False
        self._kept = [self._head.forward(self._prefix), *(self._kept or ())]

    def so_far(self) -> bytes:
        """All that a new connection is sent."""
        data = b"".join(self._kept or ())
        if self.large:
            self.forget()
        return data

    def answered(self) -> None:
        """The engine has it: it is not sent again, unless it is restored."""
        self._kept = None

    def restore(self) -> None:
        """What was replaced is to be sent after all, as the client sent it."""
        self._kept, self._original, self.replaced = self._original, [], False

    def forget(self) -> None:
        """It need not be sent again."""
        self._kept = None
        self._original = []
        if self._content is None:
            self._share.clear()

    def close(self) -> None:
        """The exchange is over."""
        self._kept = self._content = None
        self._original = []
        self._share.clear()
