"""One bound on the bodies that are held, over all exchanges: in flight, in open windows, unread."""

from __future__ import annotations


class Memory:
    """Bytes that may still be held. What finds no room is not held back, and not recorded; its exchange goes on.

    Bodies and answers count from their first byte. Buffers of a single read (up to 64 KiB on each side) do not.
    """

    __slots__ = ("left",)

    def __init__(self, limit: int) -> None:
        self.left = limit


class Share:
    """What one holder has taken of the memory."""

    __slots__ = ("_memory", "size")

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.size = 0

    def take(self, size: int) -> bool:
        """Room for so many more bytes; False if there is none."""
        if size > self._memory.left:
            return False
        self._memory.left -= size
        self.size += size
        return True

    def clear(self) -> None:
        """Give all of it back."""
        self._memory.left += self.size
        self.size = 0
