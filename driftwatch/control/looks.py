"""Prompt lookup beside the incumbent in all segments, kept for those who ask often: each takes half a second."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

from sqlalchemy.orm import Session

from driftwatch.control import untrained
from driftwatch.control.reports import CellReport
from driftwatch.control.untrained import Untrained
from driftwatch.settings import Settings
from driftwatch.store.samples import DAY

REFRESH_S = 300.0
"""How old a comparison gets before it is made anew."""
AT_ONCE = 2
"""Segments that are compared at one look: whoever looks waits for it."""
PAUSE_S = AT_ONCE * REFRESH_S / 10
"""Between two looks that make comparisons anew: ten segments keep to the time above, and more take longer, so that at
most 2% of the time goes there."""


class Looks:
    """The same figures for API and metrics, of however many threads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = Lock()
        self._found: dict[str, tuple[float, list[Untrained]]] = {}
        """By segment, with when it was made."""
        self._paused_until = 0.0

    def over(self, session: Session, cells: Iterable[CellReport], now: float) -> dict[str, list[Untrained]]:
        """By segment of these cells; one that was not compared yet is left out."""
        segments: dict[str, list[CellReport]] = {}
        for report in cells:
            segments.setdefault(report.cell.segment, []).append(report)
        with self._lock:
            for segment in self._due(segments, now):
                self._found[segment] = now, list(untrained.beside(session, self._settings, segment, segments[segment]))
            # One who asks for fewer segments than another takes nothing away from the other.
            gone = [name for name, (made, _) in self._found.items() if name not in segments and made <= now - DAY]
            for name in gone:
                del self._found[name]
            return {name: found for name, (_, found) in self._found.items() if name in segments}

    def _due(self, segments: Iterable[str], now: float) -> list[str]:
        """New ones at every look, before others; others in order of age, with a pause between."""
        if new := [name for name in segments if name not in self._found]:
            return sorted(new)[:AT_ONCE]
        made = {name: self._found[name][0] for name in segments}
        old = sorted((name for name in made if made[name] <= now - REFRESH_S), key=lambda name: made[name])
        if not old or now < self._paused_until:
            return []
        self._paused_until = now + PAUSE_S
        return old[:AT_ONCE]
