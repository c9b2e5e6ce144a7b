"""Which exchanges are kept: per segment and window a uniform sample of known size, chosen by a draw at their arrival.

Each exchange draws a number in [0, 1) when it comes, and is admitted if that is below its segment's limit: only then is
it copied, and more asked of the engine for it. The limit follows from how many came in the window before, so that a few
more are admitted than there is room for; with little traffic it is 1.

A window is made of the exchanges that ended in it. They may have come under different limits; those below the smallest
one had the same chance, however long they took, and of these the k smallest draws stay (bottom-k). Draws and limits
know nothing of each other nor of a request, so each subset of k of the window's n is equally likely: each exchange
stays with probability k/n and stands for n/k of them. Where an admitted one was lost on the way, the share of those
lost is known below that limit, and the kept ones stand for the others. Should a window have admitted none, as after a
sudden fall of the traffic, the next one stands for it too.

The next m smallest draws stay as well where that is asked for, as training data alone: a separate stream that no
estimate sees, and that changes nothing in the first one.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

T = TypeVar("T")


class Room(NamedTuple):
    """Exchanges that one segment's window keeps for estimates, and further ones for training alone."""

    estimate: int
    mining: int = 0

    def limit(self, seen: int) -> float:
        """Under which to admit where ``seen`` come in a window.

        Twice the room, so that half the traffic still fills it, and six more: then no more than one in 1,900 windows
        of steady (Poisson) traffic is short, and what else is read of admitted answers is known where the room is none.
        """
        return min(1.0, (2 * sum(self) + 6) / max(seen, 1))


class Ticket(NamedTuple):
    """An exchange's draw, and the limit under which it came."""

    draw: float
    limit: float

    @property
    def admitted(self) -> bool:
        """It may be kept."""
        return self.draw < self.limit


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """An exchange that was kept, what for, and for how many it stands."""

    segment: str
    item: T
    weight: float
    """n/k: the weights of a segment's windows add up to all that they saw. One that was mined stands for itself."""
    purpose: Literal["estimate", "mining"] = "estimate"


@dataclass(frozen=True, slots=True)
class Window(Generic[T]):
    """What a segment's window saw, and what it kept, each purpose in the order in which it ended."""

    segment: str
    seen: int
    lost: int
    """So many were admitted, and could not be copied."""
    kept: list[Kept[T]]

    @property
    def not_chosen(self) -> int:
        return self.seen - self.lost - len(self.kept)


@dataclass(slots=True)
class _Open(Generic[T]):
    room: Room
    seen: int = 0
    limit: float = 1.0
    """The smallest under which one of its exchanges came."""
    heap: list[tuple[float, int, T]] = field(default_factory=list)
    """(-draw, -order, exchange): the first goes next. Orders differ, so exchanges are never compared."""
    whole: list[float] = field(default_factory=list)
    """Draws of all that were admitted and copied."""
    lost: list[float] = field(default_factory=list)

    def add(self, ticket: Ticket, item: T | None) -> None:
        self.seen += 1
        self.limit = min(self.limit, ticket.limit)
        if not ticket.admitted:
            return
        if item is None:
            self.lost.append(ticket.draw)
            return
        self.whole.append(ticket.draw)
        entry = (-ticket.draw, -self.seen, item)
        if len(self.heap) < sum(self.room):
            heapq.heappush(self.heap, entry)
        elif self.heap:
            heapq.heappushpop(self.heap, entry)

    def close(self, segment: str, carried: float) -> tuple[Window[T], float]:
        """The window, and for how many more the next one stands. ``carried``: so many of those before."""
        ranked = sorted((entry for entry in self.heap if -entry[0] < self.limit), reverse=True)
        whole, lost = (sum(draw < self.limit for draw in draws) for draws in (self.whole, self.lost))
        stands_for = carried + self.seen
        if whole + lost:
            stands_for *= whole / (whole + lost)
        k = min(self.room.estimate, len(ranked))
        kept = [Kept(segment, item, stands_for / k) for item in _in_order(ranked[:k])]
        kept += [Kept(segment, item, 1.0, "mining") for item in _in_order(ranked[k:])]
        left = stands_for if self.room.estimate and not whole + lost else 0.0
        return Window(segment, self.seen, len(self.lost), kept), left


class Sampler(Generic[T]):
    """Pure and synchronous: time comes as ``now``, in seconds of a clock that does not go back.

    ``room`` is asked once for each window of each segment, when it opens, and for its limit when it closes; a plain
    number holds for all. ``draw`` gives numbers in [0, 1) that no client can foresee.
    """

    def __init__(
        self, room: int | Callable[[str], Room], window_s: float, *, draw: Callable[[], float] = random.random
    ) -> None:
        self._room = room if callable(room) else lambda _segment: Room(room)
        self._window_s = window_s
        self._draw = draw
        self._index = 0
        self._open: dict[str, _Open[T]] = {}
        self._limits: dict[str, float] = {}
        """Of segments that had traffic in the window before; 1 for others."""
        self._carried: dict[str, float] = {}
        self._closed: list[Window[T]] = []

    @property
    def held(self) -> int:
        """Exchanges in memory: at most a segment's room, and those of closed windows until they are taken."""
        closed = sum(len(window.kept) for window in self._closed)
        return sum(len(window.heap) for window in self._open.values()) + closed

    def ticket(self, segment: str, now: float) -> Ticket:
        """For an exchange that comes now."""
        self._roll(now)
        return Ticket(self._draw(), self._limits.get(segment, 1.0))

    def add(self, segment: str, ticket: Ticket, item: T | None, now: float) -> None:
        """Count an exchange that has ended, and keep it while its draw is among the smallest. None: it was not copied,
        since it was not admitted, or although it was."""
        self._roll(now)
        window = self._open.get(segment)
        if window is None:
            window = self._open[segment] = _Open(self._room(segment))
        window.add(ticket, item)

    def close(self, now: float) -> list[Window[T]]:
        """Take the windows that have ended by ``now``."""
        self._roll(now)
        closed, self._closed = self._closed, []
        return closed

    def flush(self) -> list[Window[T]]:
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
            if index > self._index + 1:
                self._limits = {}  # nothing came in the window before
            self._index = index

    def _close_open(self) -> None:
        for segment, window in self._open.items():
            closed, left = window.close(segment, self._carried.pop(segment, 0.0))
            self._closed.append(closed)
            if left:
                self._carried[segment] = left
        self._limits = {segment: self._room(segment).limit(window.seen) for segment, window in self._open.items()}
        self._open.clear()


def _in_order(entries: list[tuple[float, int, T]]) -> list[T]:
    return [item for *_, item in sorted(entries, key=lambda entry: -entry[1])]
