"""The two sides of an exchange: what it needs of the client's connection, and the engine's connection of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Client(Protocol):
    """What an exchange needs of the client's connection."""

    leaving: bool
    """It closes behind this answer."""
    full: bool
    """It takes no more bytes for now."""
    write: Callable[[bytes], None]

    @property
    def half_closed(self) -> bool:
        """It sends nothing behind this request."""

    def engine_full(self, full: bool) -> None:
        """Stop or go on reading the request."""

    def refuse(self, status: int, code: str, message: str, hint: str, *, bodiless: bool = False) -> None:
        """Answer for the tap itself, and end the exchange."""

    def write_eof(self) -> None: ...

    def done(self) -> None:
        """The exchange is over, or became a tunnel."""

    def close(self) -> None:
        """Close behind what was written."""

    def reset(self) -> None:
        """Close so that no client takes the end of the connection for that of the answer."""


class Served(Protocol):
    """What a connection to the engine needs of whom it serves: an exchange."""

    tunnel: bool
    """The two directions end apart."""

    def answer(self, data: bytes) -> None:
        """Bytes from the engine."""

    def engine_ended(self) -> None:
        """The engine sends nothing more into a tunnel."""

    def engine_lost(self, failure: Exception | None, *, used: bool) -> None:
        """The connection is gone; without a failure, the engine closed it in order. ``used``: it served before."""

    def engine_full(self, full: bool) -> None:
        """The engine takes no more bytes for now, or takes them again."""
