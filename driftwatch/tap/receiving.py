"""An answer on its way to the client: its heads, where its body ends, and what hooks make of it."""

from __future__ import annotations

from driftwatch.tap import http1
from driftwatch.tap.framing import Chunked, Framing, Length, UntilClose
from driftwatch.tap.hooks import Guard
from driftwatch.tap.http1 import AnswerHead, Malformed
from driftwatch.tap.memory import Memory
from driftwatch.tap.rewriting import Rewriting


class Receiving:
    """Follows one answer. All but ``head`` work on the final answer, after ``begin``."""

    def __init__(self, hooks: Guard, memory: Memory) -> None:
        self._hooks = hooks
        self._memory = memory
        self._watching = hooks.capture_bytes > 0
        self._partial = b""
        self._framing: Framing = Length(0)
        self._rewriting: Rewriting | None = None
        self.begun = self.complete = False

    @property
    def until_close(self) -> bool:
        """It ends with the engine's connection."""
        return isinstance(self._framing, UntilClose)

    def head(self, data: bytes) -> tuple[AnswerHead, bytes] | None:
        """The next head, interim ones too, and what is behind it; None until it is whole. Raises Malformed."""
        data = self._partial + data
        end = data.find(b"\r\n\r\n") + 4
        if end > 3:
            self._partial = b""
            return http1.answer(data[:end]), data[end:]
        if len(data) > 2 * http1.LARGEST_HEAD:
            raise Malformed("the head is too large")
        self._partial = data
        return None

    def frame(self, head: AnswerHead, method: str) -> None:
        """Find how the body behind the final head is framed."""
        self.begun = True
        if head.bodiless(method):
            self._framing = Length(0)
        elif head.chunked:
            self._framing = Chunked()
        elif head.length is not None:
            self._framing = Length(head.length)
        else:
            self._framing = UntilClose()
        self.complete = self._framing.complete

    def begin(self, head: AnswerHead, *, replaced: bool, close: bool) -> bytes:
        """The head for the client, as far as it need not wait. ``replaced``: hooks may change the body."""
        hold = self._hooks.head(head.status, head.end_to_end())
        if not replaced or self.complete:
            return head.forward(close=close)
        self._rewriting = Rewriting(head, self._framing, self._memory, hold=hold and head.length is not None)
        return self._rewriting.begin(close=close)

    def take(self, data: bytes, *, close: bool) -> tuple[bytes, int]:
        """Bytes for the client, and how many of ``data`` belonged to the answer. Raises Malformed."""
        framing, rewriting = self._framing, self._rewriting
        if not self._watching:
            taken = framing.take(data, None)
            self.complete = framing.complete
            return (data if taken == len(data) else data[:taken]), taken
        content: list[bytes] = []
        taken = framing.take(data, content)
        self.complete = framing.complete
        out = b""
        if rewriting is None:
            out = data if taken == len(data) else data[:taken]
        if content:
            body = content[0] if len(content) == 1 else b"".join(content)
            changed = self._hooks.chunk(body)
            if rewriting is not None:
                out = rewriting.body(body, changed, close=close, failed=self._hooks.failed)
        return out, taken

    def end(self, *, close: bool) -> bytes:
        """Bytes for the client at its end."""
        rest = self._hooks.release()
        if self._rewriting is None:
            return b""
        return self._rewriting.end(rest, close=close, failed=self._hooks.failed)

    def broken(self, *, close: bool) -> bytes:
        """Bytes for the client where it breaks off."""
        rest = self._hooks.release()
        return b"" if self._rewriting is None else self._rewriting.broken(rest, close=close)

    def close(self) -> None:
        """The exchange is over."""
        if self._rewriting is not None:
            self._rewriting.close()
