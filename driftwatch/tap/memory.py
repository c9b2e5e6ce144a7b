"""One bound on the bodies that are held for recording, over all exchanges: in flight, in open windows, unread."""

from __future__ import annotations


class Memory:
    """Bytes that may still be held. What finds no room is not recorded; the exchange itself goes on."""

    __slots__ = ("left",)

    def __init__(self, limit: int) -> None:
        self.left = limit

    def take(self, size: int) -> bool:
        if size > self.left:
            return False
        self.left -= size
        return True

    def give(self, size: int) -> None:
        self.left += size
