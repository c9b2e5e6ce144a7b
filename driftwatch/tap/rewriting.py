"""An answer that hooks change, framed anew."""

from __future__ import annotations

from driftwatch.tap.framing import Chunked, Framing
from driftwatch.tap.http1 import AnswerHead
from driftwatch.tap.memory import Memory, Share

HELD_BYTES = 256 * 1024
"""Of an answer with a length so much is held back, to state the right one."""


class Rewriting:
    """Frames what goes to the client in the engine's own manner: chunked, by length, or until the connection closes.

    A length is that of what is left where the answer is small. A larger answer passes as it comes, under the engine's
    own length; what was taken out of it is made up for at its end by line ends, which say nothing in JSON or a stream
    of events.
    """

    def __init__(self, head: AnswerHead, framing: Framing, memory: Memory, *, hold: bool) -> None:
        self._head = head
        self._framing = framing
        self._share = Share(memory)
        self._held = hold
        """The head waits for the number of bytes behind it."""
        self._original: list[bytes] = []
        """What came while the head waits."""
        self._changed: list[bytes] = []
        """What goes to the client in its place, all at once: only then is its length known."""
        self._missing = 0
        """So many bytes fewer have gone to the client than have come, under a length."""

    def begin(self, *, close: bool) -> bytes:
        return b"" if self._held else self._head.forward(close=close)

    def body(self, data: bytes, out: bytes, *, close: bool, failed: bool) -> bytes:
        """Bytes for the client in place of ``data``."""
        if not self._held:
            self._missing += len(data) - len(out)
            return self._frame(out)
        if failed:
            return self._release(close) + b"".join([*self._original, data])
        self._original.append(data)
        self._changed.append(out)
        if self._share.size + 2 * len(data) <= 2 * HELD_BYTES and self._share.take(2 * len(data)):
            return b""
        self._missing = sum(map(len, self._original)) - sum(map(len, self._changed))
        out = b"".join(self._changed)
        self._original, self._changed = [], []
        return self._release(close) + out

    def end(self, rest: bytes, *, close: bool, failed: bool) -> bytes:
        """Bytes for the client at the answer's end."""
        if self._held:
            if failed:
                return self._release(close) + b"".join(self._original)
            whole = b"".join([*self._changed, rest])
            return self._head.forward(close=close, length=len(whole)) + whole
        if isinstance(self._framing, Chunked):
            return self._frame(rest) + b"0\r\n" + self._framing.trailers
        if self._head.length is not None:
            return rest + b"\n" * (self._missing - len(rest))
        return rest

    def broken(self, rest: bytes, *, close: bool) -> bytes:
        """Bytes for the client where the answer breaks off: no end of it."""
        head = self._release(close) + b"".join(self._changed) if self._held else b""
        return head + self._frame(rest)

    def close(self) -> None:
        """The exchange is over."""
        self._original, self._changed = [], []
        self._share.clear()

    def _release(self, close: bool) -> bytes:
        self._held = False
        self._share.clear()
        return self._head.forward(close=close)

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if data and isinstance(self._framing, Chunked) else data
