"""What the relay tells of each exchange, and may be told in return. All that the relay knows of the rest of the tap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from driftwatch.tap.asgi import Headers

Ending = Literal["complete", "aborted", "broken", "unreachable"]
"""How an exchange ended: in full, by the client's leaving, by the engine's breaking off, or before it could begin."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request's head as the client sent it."""

    method: str
    path: str
    headers: Headers


class Hooks(Protocol):
    """What watches one exchange, and may change it. Called in the request path: quick, and never raising."""

    @property
    def capture_bytes(self) -> int:
        """A request body up to this size is read before it is sent on, and given to ``body``; 0: it is streamed."""

    def body(self, data: bytes | None) -> tuple[bytes, Headers] | None:
        """The request's body, None if it was too large. Returns another body and the headers to go with it, or None."""

    def sent(self) -> None:
        """The request's head has gone to the engine."""

    def head(self, status: int, headers: Headers) -> bool:
        """The answer's head. True holds it back until bytes are let through: their number may change.

        If they are let through by ``end`` only, a ``content-length`` is set to their number.
        """

    def chunk(self, data: bytes) -> bytes:
        """Bytes of the answer. Returns what goes to the client now."""

    def end(self, ending: Ending) -> bytes:
        """The exchange is over; called exactly once. Returns what was still held back."""


Open = Callable[[Request], Hooks]
"""Called for every request when its head has come."""
