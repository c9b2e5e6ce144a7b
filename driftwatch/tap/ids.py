"""Ids of records."""

from __future__ import annotations

import uuid
from collections import OrderedDict

LONGEST = 256


class Ids:
    """The client's own ids, made unique where it gives one again, or new ones."""

    REMEMBERED = 10_000

    def __init__(self) -> None:
        self._seen: OrderedDict[str, None] = OrderedDict()

    def unique(self, given: str | None) -> str:
        """Otherwise a constant id, or that of a retry, would pass for a sample that is already stored."""
        if given is None:
            return uuid.uuid4().hex
        again = given in self._seen
        self._seen[given] = None
        self._seen.move_to_end(given)
        if len(self._seen) > self.REMEMBERED:
            self._seen.popitem(last=False)
        return f"{given[: LONGEST - 33]}-{uuid.uuid4().hex}" if again else given
