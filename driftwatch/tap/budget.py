"""How much each segment may keep in a window: what control says, asked for again and again.

The tap needs no answer. Until there is one the settings hold, and afterwards the last one; control bounds what is
replayed a day in any case. A window keeps the budget that it was opened with, so that k / n is exact in each.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from driftwatch.tap.sampler import Room

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 20
MOST_KEPT = 10_000
"""Exchanges of one segment and window, whatever control says: they are held in memory."""
TIMEOUT = aiohttp.ClientTimeout(total=5, sock_connect=2)


@dataclass(frozen=True)
class Budgets:
    """Exchanges kept per window for figures, by segment or else ``per_window``; and further ones for training alone."""

    per_window: int
    segments: Mapping[str, int] = field(default_factory=dict)
    mining: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, body: bytes) -> Budgets:
        """Control's answer. Raises ValueError if it is none."""
        said = orjson.loads(body)
        try:
            return cls(_count(said["per_window"]), _counts(said["segments"]), _counts(said["mining"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no budgets: {error}") from None


def _counts(said: Any) -> dict[str, int]:
    return {str(segment): _count(count) for segment, count in said.items()}


def _count(said: Any) -> int:
    if not isinstance(said, int) or said < 0:
        raise ValueError(f"no number of requests: {said!r}")
    return min(said, MOST_KEPT)


class Budget:
    """The budgets in force, kept up to date by :meth:`run`."""

    def __init__(self, control_url: str, per_window: int, *, every_s: float, token: str | None) -> None:
        self._url = f"{control_url}/v1/sampling"
        self._every_s = every_s
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._params = {"tap": uuid.uuid4().hex}
        self._version: str | None = None
        self._answered = True
        self.current = Budgets(per_window)

    def room(self, segment: str) -> Room:
        """What a window of this segment may keep that opens now."""
        now = self.current
        return Room(now.segments.get(segment, now.per_window), now.mining.get(segment, 0))

    async def run(self) -> None:
        """Ask until cancelled."""
        async with aiohttp.ClientSession(timeout=TIMEOUT, cookie_jar=aiohttp.DummyCookieJar()) as session:
            while True:
                try:
                    await self._ask(session)
                    self._say(None)
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    self._say(error)
                await asyncio.sleep(self._every_s)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        known = {} if self._version is None else {"if-none-match": self._version}
        async with session.get(self._url, params=self._params, headers=self._headers | known) as answer:
            if answer.status == 304:
                return
            if answer.status != 200:
                raise ValueError(f"control answers {answer.status}")
            body = await answer.content.read(MOST_BYTES)
            if not answer.content.at_eof():
                raise ValueError(f"control answers more than {MOST_BYTES} bytes")
            self.current = Budgets.parse(body)
            self._version = answer.headers.get("etag")

    def _say(self, error: Exception | None) -> None:
        """Once when control falls silent, once when it is back. No warning: the shipper warns of that already."""
        if (error is None) != self._answered:
            self._answered = error is None
            if error is None:
                logger.info("budgets come from control again")
            else:
                logger.info("no budgets from control, the last ones hold: %s", str(error) or type(error).__name__)
