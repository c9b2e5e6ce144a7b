"""Who may see the page: a cookie got for control's token, where there is one.

The cookie holds its end and an HMAC-SHA-256 of that under the token (RFC 2104), so it tells nobody the token, needs no
store, holds at every replica of control, and is void once the token changes. It opens the page alone, never the API:
what a browser sends by itself must not be able to change anything.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

COOKIE = "driftwatch_page"
VALID_S = 12 * 3600
FAILURES = 5
"""Wrong tokens that one address may send in ``WINDOW_S``; ten times as many over all addresses."""
WINDOW_S = 60.0
ADDRESSES = 1024
"""Addresses remembered at most; the longest silent is forgotten first."""


class Door:
    """Without a token it stands open: control then listens on loopback alone."""

    def __init__(self, token: str | None, clock: Callable[[], float]) -> None:
        self._token = None if token is None else token.encode()
        self._clock = clock
        self._failures: OrderedDict[str, list[float]] = OrderedDict()
        self._all: list[float] = []
        self._lock = Lock()

    @property
    def locked(self) -> bool:
        """Whether a cookie is wanted at all."""
        return self._token is not None

    def lets_in(self, cookie: str | None) -> bool:
        """Whether a cookie is one of ours and not over."""
        if self._token is None:
            return True
        end, _, seal = (cookie or "").partition(".")
        if not (end.isascii() and end.isdigit() and len(end) <= 12 and seal.isascii()):
            return False
        return hmac.compare_digest(seal, _seal(self._token, end)) and int(end) > self._clock()

    def cookie(self, given: str) -> str | None:
        """A cookie for the right token; None for any other, compared in constant time."""
        if self._token is None or not hmac.compare_digest(given.encode(), self._token):
            return None
        end = str(int(self._clock()) + VALID_S)
        return f"{end}.{_seal(self._token, end)}"

    def wait_s(self, address: str) -> int:
        """Seconds that an address has to wait after too many wrong tokens; 0: it may try."""
        now = self._clock()
        with self._lock:
            self._all = [at for at in self._all if at > now - WINDOW_S]
            mine = [at for at in self._failures.get(address, []) if at > now - WINDOW_S]
            for failures, most in ((mine, FAILURES), (self._all, 10 * FAILURES)):
                if len(failures) >= most:
                    return max(1, math.ceil(failures[-most] + WINDOW_S - now))
        return 0

    def failed(self, address: str) -> None:
        """Note a wrong token."""
        now = self._clock()
        with self._lock:
            mine = self._failures.pop(address, [])
            self._failures[address] = [*(at for at in mine if at > now - WINDOW_S), now]
            self._all.append(now)
            if len(self._failures) > ADDRESSES:
                self._failures.popitem(last=False)


def _seal(token: bytes, end: str) -> str:
    return hmac.new(token, f"driftwatch page until {end}".encode(), hashlib.sha256).hexdigest()
