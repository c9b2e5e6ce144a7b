"""A copy of both bodies of an exchange, for as long as they are small enough and there is room for them."""

from __future__ import annotations

from driftwatch.tap.hooks import Unread
from driftwatch.tap.memory import Memory, Share


class Capture:
    """Up to ``limit`` bytes of each body. What is lost stays lost, and holds no memory."""

    __slots__ = ("_answer", "_limit", "_size", "lost", "request", "share")

    def __init__(self, limit: int, memory: Memory) -> None:
        self.request: bytes | None = None
        self.lost: Unread | None = None
        """Why there is no copy."""
        self.share = Share(memory)
        self._limit = limit
        self._answer: list[bytes] = []
        self._size = 0

    @property
    def answer(self) -> bytes:
        """What has come of it."""
        return b"".join(self._answer)

    def begin(self, request: bytes) -> None:
        """The whole request."""
        if self.share.take(len(request)):
            self.request = request
        else:
            self.lose("memory")

    def add(self, data: bytes) -> None:
        """More of the answer."""
        if self.lost is not None:
            return
        self._size += len(data)
        if self._size > self._limit:
            self.lose("too_large")
        elif self.share.take(len(data)):
            self._answer.append(data)
        else:
            self.lose("memory")

    def lose(self, reason: Unread) -> None:
        self.lost = reason
        self.request = None
        self._answer = []
        self.share.clear()
