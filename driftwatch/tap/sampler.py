"""Which exchanges are kept: per segment and window a uniform sample of known size, chosen by hash.

Bottom-k: of the n exchanges that a segment had in a window those with the k smallest keyed hashes stay. Each subset of
k is equally likely, so each exchange stays with probability k/n and stands for n/k of them. Clients cannot choose to
be kept: they do not know the key.
"""

from __future__ import annotations

import hashlib
import heapq
import os
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """An exchange that was kept, and for how many it stands."""

    segment: str
    item: T
    seen: int
    kept: int

    @property
    def weight(self) -> float:
        """n/k: the weights of a segment's window add up to all that it saw."""
        return self.seen / self.kept


@dataclass(slots=True)
class _Window(Generic[T]):
    seen: int = 0
    heap: list[tuple[int, int, T]] = field(default_factory=list)
    """(-hash, -arrival, exchange): the first goes next. Arrivals differ, so exchanges are never compared."""


class Sampler(Generic[T]):
    """Pure and synchronous: time comes as ``now``, in seconds of a clock that does not go back."""

    def __init__(self, per_window: int, window_s: float, *, key: bytes | None = None) -> None:
        self._per_window = per_window
        self._window_s = window_s
        self._key = os.urandom(32) if key is None else key
        self._index = 0
        self._open: dict[str, _Window[T]] = {}
        self._closed: list[Kept[T]] = []

    @property
    def held(self) -> int:
        """Exchanges in memory: at most ``per_window`` a segment, and those of closed windows until they are taken."""
        return sum(len(window.heap) for window in self._open.values()) + len(self._closed)

    def add(self, segment: str, id: str, item: T, now: float) -> None:
        """Count a finished exchange, and keep it for as long as its hash is among the smallest."""
        self._roll(now)
        window = self._open.setdefault(segment, _Window())
        window.seen += 1
        entry = (-self._hash(id), -window.seen, item)
        if len(window.heap) < self._per_window:
            heapq.heappush(window.heap, entry)
        else:
            heapq.heappushpop(window.heap, entry)

    def close(self, now: float) -> list[Kept[T]]:
        """Take what was kept in the windows that have ended by ``now``."""
        self._roll(now)
        closed, self._closed = self._closed, []
        return closed

    def flush(self) -> list[Kept[T]]:
        """Take everything, the open windows too."""
        self._close_open()
        closed, self._closed = self._closed, []
        return closed

    def ends_in(self, now: float) -> float:
        """Seconds until the window at ``now`` ends."""
        return self._window_s - now % self._window_s

    def _roll(self, now: float) -> None:
        index = int(now // self._window_s)
        if index > self._index:
            self._close_open()
            self._index = index

    def _close_open(self) -> None:
        for segment, window in self._open.items():
            kept = [item for *_, item in sorted(window.heap, key=lambda entry: -entry[1])]
            self._closed += [Kept(segment, item, window.seen, len(kept)) for item in kept]
        self._open.clear()

    def _hash(self, id: str) -> int:
        # The window is part of it: an id that a client sends again and again is not kept again and again.
        text = f"{self._index}:{id}".encode(errors="surrogatepass")
        return int.from_bytes(hashlib.blake2b(text, key=self._key, digest_size=16).digest())
