"""A capped number of names, so that what clients send cannot make endless series."""

from __future__ import annotations

import time
from collections.abc import Callable

SILENT_S = 86_400.0
"""A name that was not seen for so long gives its place away, if another needs one."""


class Places:
    """Names that have a place, those seen longest ago first."""

    def __init__(
        self,
        limit: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        freed: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``freed`` is told of a name that has lost its place."""
        self._limit = limit
        self._clock = clock
        self._freed = freed
        self._seen: dict[str, float] = {}

    def take(self, name: str) -> bool:
        """Whether the name, which was seen now, has a place."""
        now = self._clock()
        if self._seen.pop(name, None) is None and len(self._seen) >= self._limit:
            oldest = next(iter(self._seen))
            if now - self._seen[oldest] < SILENT_S:
                return False
            del self._seen[oldest]
            self._freed(oldest)
        self._seen[name] = now
        return True
