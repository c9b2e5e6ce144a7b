"""The little of ASGI that the tap needs: types, and whole answers of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
"""Header lines in order, names in lower case."""


async def start(send: Send, status: int, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def write(send: Send, data: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def respond(send: Send, status: int, body: bytes, content_type: str = "application/json") -> None:
    """Send a whole answer."""
    headers = [(b"content-type", content_type.encode()), (b"content-length", b"%d" % len(body))]
    await start(send, status, headers)
    await write(send, body, more=False)


def error(code: str, message: str, hint: str) -> bytes:
    """The one shape of every error."""
    return orjson.dumps({"error": {"code": code, "message": message, "hint": hint}})
