"""The client side of the relay: an HTTP client that adds nothing, keeps nothing and follows nothing."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from types import SimpleNamespace

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from driftwatch.tap.asgi import Headers

# RFC 9110, 7.6.1, and what older proxies add. ``expect`` was answered by the listener before the body was read.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding"
    b" upgrade expect".split()
)
KEEP_ALIVE_S = 3.0
"""vLLM and uvicorn close idle connections after 5 s: one older than this could be closing while it is chosen."""
CONNECT_TIMEOUT_S = 10.0
LONGEST_HEADER = 64 * 1024
PIECE = 64 * 1024


class Upstream:
    """Sends requests to the engine at ``url``. Use it as an async context manager."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> Upstream:
        self._pooled = _session(aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S))
        self._fresh = _session(aiohttp.TCPConnector(limit=0, force_close=True))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._pooled.close()
        await self._fresh.close()

    async def open(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes | AsyncIterable[bytes] | None,
        *,
        replayable: Callable[[], bool],
        sent: Callable[[], None],
    ) -> aiohttp.ClientResponse:
        """Send a request and return once the answer's head is there; the caller closes it.

        A kept connection may be closed by the engine in the very moment it is chosen. Then, and if ``replayable``, the
        request is sent a second time on a new connection. Raises aiohttp.ClientError, OSError or ValueError.
        """
        url = URL(self._url + target, encoded=True)
        lines = CIMultiDict((_text(name), _text(value)) for name, value in end_to_end(headers))
        trace = SimpleNamespace(reused=False, sent=sent)

        async def attempt(session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
            data = pieces(body) if isinstance(body, bytes) else body
            return await session.request(
                method, url, headers=lines, data=data, allow_redirects=False, trace_request_ctx=trace
            )

        try:
            return await attempt(self._pooled)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if not trace.reused or not replayable():
                raise
        return await attempt(self._fresh)


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers that belong to the exchange and not to one connection of it."""
    headers = list(headers)
    named = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    return [line for line in headers if line[0] not in HOP_BY_HOP and line[0] not in named]


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    trace = aiohttp.TraceConfig()

    async def reused(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        context.trace_request_ctx.reused = True

    async def created(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        context.trace_request_ctx.reused = False

    async def sent(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        context.trace_request_ctx.sent()

    trace.on_connection_reuseconn.append(reused)
    trace.on_connection_create_end.append(created)
    trace.on_request_headers_sent.append(sent)
    return aiohttp.ClientSession(
        connector=connector,
        # Any other jar would send one user's cookies along with the next one's request.
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
        # A completion may take hours, and may be silent for long; only connecting has a limit.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        max_line_size=LONGEST_HEADER,
        max_field_size=LONGEST_HEADER,
        trace_configs=[trace],
    )


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    """A body in pieces: one large write would hold up every other stream."""
    for begin in range(0, len(data), PIECE):
        yield data[begin : begin + PIECE]


def _text(value: bytes) -> str:
    # The client library writes headers as UTF-8.
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
