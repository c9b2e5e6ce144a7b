"""An answer that hooks change, framed anew."""

from __future__ import annotations

from driftwatch.tap.framing import Chunked, Framing
from driftwatch.tap.http1 import AnswerHead


class Rewriting:
    """Frames what goes to the client in the engine's own manner: chunked, by length, or until the connection closes."""

    def __init__(self, head: AnswerHead, framing: Framing, *, hold: bool) -> None:
        self._head = head
        self._framing = framing
        self._held = hold
        """The head waits for the number of bytes behind it."""
        self._original: list[bytes] = []
        """What came while the head waits."""
        self._changed: list[bytes] = []
        """What goes to the client in its place, all at once: only then is its length known."""

    def begin(self, *, close: bool) -> bytes:
        return b"" if self._held else self._head.forward(close=close)

    def body(self, data: bytes, out: bytes, *, close: bool, failed: bool) -> bytes:
        """Bytes for the client in place of ``data``."""
        if not self._held:
            return self._frame(out)
        self._original.append(data)
        if failed:
            return self._release(close) + b"".join(self._original)
        self._changed.append(out)
        return b""

    def end(self, rest: bytes, *, close: bool, failed: bool) -> bytes:
        """Bytes for the client at the answer's end."""
        if self._held:
            if failed:
                return self._release(close) + b"".join(self._original)
            whole = b"".join([*self._changed, rest])
            return self._head.forward(close=close, length=len(whole)) + whole
        if isinstance(self._framing, Chunked):
            return self._frame(rest) + b"0\r\n" + self._framing.trailers
        return rest

    def broken(self, rest: bytes, *, close: bool) -> bytes:
        """Bytes for the client where the answer breaks off: no end of it."""
        head = self._release(close) + b"".join(self._changed) if self._held else b""
        return head + self._frame(rest)

    def _release(self, close: bool) -> bytes:
        self._held = False
        return self._head.forward(close=close)

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if data and isinstance(self._framing, Chunked) else data
