"""A retraining pipeline's side of the webhook: takes events and verifies their signatures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from standardwebhooks import Webhook, WebhookVerificationError


@dataclass(frozen=True)
class Received:
    id: str
    type: str
    verified: bool
    data: dict[str, Any]


@dataclass
class Receiver:
    """Keeps what it got, each event once: the id is the same on every attempt."""

    secret: str
    events: dict[str, Received] = field(default_factory=dict)
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            event: dict[str, Any] = Webhook(self.secret).verify(body, dict(request.headers))
            verified = True
        except WebhookVerificationError:
            event, verified = await request.json(), False
        received = Received(request.headers.get("webhook-id", ""), event["type"], verified, event["data"])
        self.events.setdefault(received.id, received)
        self._came.set()
        return web.Response(status=204)

    async def wait_for(self, type: str, seconds: float) -> bool:
        """Whether an event of this type came, within so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                while not any(event.type == type for event in self.events.values()):
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            return False
        return True

    @asynccontextmanager
    async def listening(self, port: int) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_post("/hook", self.take)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield
        finally:
            await runner.cleanup()
