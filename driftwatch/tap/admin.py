"""The tap's own listener: health, readiness and metrics. Every path on the other listener belongs to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from driftwatch.tap.asgi import Receive, Scope, Send, error, respond


class Admin:
    """``/healthz`` says that the process lives, ``/readyz`` whether it takes new requests."""

    def __init__(self, registry: CollectorRegistry, ready: Callable[[], bool]) -> None:
        self._registry = registry
        self._ready = ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path not in ("/healthz", "/readyz", "/metrics"):
            hint = "there are /healthz, /readyz and /metrics; the engine is behind tap.listen"
            await respond(send, 404, error("not_found", f"nothing at {path}", hint))
        elif scope["method"] not in ("GET", "HEAD"):
            await respond(send, 405, error("method_not_allowed", f"{scope['method']} {path}", "use GET"))
        elif path == "/metrics":
            accept = dict(scope["headers"]).get(b"accept", b"").decode("latin-1")
            encode, content_type = choose_encoder(accept)
            # A hundred segments make ten thousand lines, which would hold up every stream for a fifth of a second.
            await respond(send, 200, await asyncio.to_thread(encode, self._registry), content_type)
        elif path == "/readyz" and not self._ready():
            await respond(send, 503, error("draining", "the tap takes no new requests", "use another instance"))
        else:
            await respond(send, 200, b'{"status":"ok"}')
