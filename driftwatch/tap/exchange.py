"""One request and its answer on their way between a client's connection and one to the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from driftwatch.tap import http1
from driftwatch.tap.framing import Chunked, Framing, Length, UntilClose
from driftwatch.tap.hooks import Ending, Guard, Open, Request
from driftwatch.tap.http1 import AnswerHead, Malformed, RequestHead
from driftwatch.tap.rewriting import Rewriting
from driftwatch.tap.sending import Sending
from driftwatch.tap.upstream import Connection, Pool

logger = logging.getLogger(__name__)


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


RACE_S = 0.5
"""An engine that had closed a kept connection says so within a round trip."""


class Exchange:
    """Passes bytes both ways, follows both framings, and tells the hooks."""

    def __init__(self, client: Client, pool: Pool, head: RequestHead, open: Open, fault: Callable[[], None]) -> None:
        self._client = client
        self._pool = pool
        self._head = head
        self._hooks = Guard(open, Request(head.method, head.path, head.lines), fault)
        self._watching = self._hooks.capture_bytes > 0
        self._sending = Sending(head, self._hooks, pool.prefix)
        self._engine: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._sent_at = 0.0
        self._going = self._retried = self._over = self._ended = self._engine_ended = self.tunnel = False
        self._partial = b""
        self._outgoing: Framing | None = None
        self._rewriting: Rewriting | None = None
        self._keep = False

    # --- from the client ----------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """The request has been read to its end."""
        return self._sending.complete

    @property
    def answering(self) -> bool:
        """The client has got a part of the final answer."""
        return self._outgoing is not None

    def begin(self, data: bytes) -> bytes:
        """The bytes behind the request's head. Returns those behind the request. Raises Malformed; nothing is sent."""
        if not self._sending.complete:
            return self.request(data)
        self._sending.show()
        return data

    def go(self) -> None:
        """What has begun well goes to the engine, as far as it need not wait for the hooks."""
        self._going = True
        self._connect()

    def request(self, data: bytes) -> bytes:
        """More of the request's body, or of a tunnel. Returns what belongs to the next request. Raises Malformed."""
        engine = self._engine
        if self.tunnel:
            if engine is not None:
                engine.transport.write(data)
            return b""
        sending = self._sending
        piece, rest = sending.take(data)
        if engine is not None:
            engine.transport.write(piece)
            if sending.large:
                sending.forget()
        elif self._going:
            self._connect()
            if self._engine is None and sending.large:
                self._client.engine_full(True)  # until there is a connection
        if self._over and sending.complete:
            self._leave()
        return rest

    def half_close(self) -> None:
        """The client sends nothing more. The engine is told likewise: many take it for the client's leaving."""
        if self._engine is None:
            return
        self._keep = False
        if self.tunnel and self._engine_ended:
            self._close_tunnel()
        elif self._engine.transport.can_write_eof():
            self._engine.transport.write_eof()
        else:  # there is no half-closing under TLS
            self.cancel()
            self._client.close()

    def client_full(self, full: bool) -> None:
        if self._engine is None:
            return
        if full:
            self._engine.transport.pause_reading()
        else:
            self._engine.transport.resume_reading()

    def cancel(self) -> None:
        """The client has gone, or must go: the engine's connection is closed, so that it stops."""
        self._drop()
        self._end("complete" if self.tunnel else "aborted")

    # --- to the engine ------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._sending.held or self._engine is not None or self._connecting is not None or self._ended:
            return
        if not self._retried and (connection := self._pool.take()) is not None:
            self._use(connection)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._open_connection())

    async def _open_connection(self) -> None:
        try:
            connection = await self._pool.connect()
        except (OSError, ValueError) as failure:
            self._connecting = None
            if not self._ended:
                self._fail("unreachable", failure)
            return
        self._connecting = None
        if self._ended:
            self._pool.give_back(connection)
        else:
            self._use(connection)

    def _use(self, connection: Connection) -> None:
        self._engine = connection
        self._sent_at = asyncio.get_running_loop().time()
        connection.user = self
        self._client.engine_full(False)
        connection.transport.write(self._sending.so_far())
        if self._client.full:
            connection.transport.pause_reading()
        if not self._retried:
            self._hooks.sent()
        if self._client.half_closed:
            self.half_close()

    # --- from the engine ----------------------------------------------------------------------------------------------

    def engine_full(self, full: bool) -> None:
        self._client.engine_full(full)

    def answer(self, data: bytes) -> None:
        if self.tunnel:
            self._client.write(data)
            return
        outgoing = self._outgoing
        if outgoing is None:
            self._read_heads(data)
            return
        if self._over:
            self._keep = False  # nobody asked
            return
        rewriting = self._rewriting
        content: list[bytes] | None = [] if self._watching else None
        try:
            taken = outgoing.take(data, content)
        except Malformed as error:
            self._break_off(error)
            return
        if rewriting is None:
            self._client.write(data if taken == len(data) else data[:taken])
        if content:
            body = content[0] if len(content) == 1 else b"".join(content)
            out = self._hooks.chunk(body)
            if rewriting is not None:
                self._client.write(rewriting.body(body, out, close=self._client.leaving, failed=self._hooks.failed))
        if outgoing.complete:
            self._finish(clean=taken == len(data))

    def _read_heads(self, data: bytes) -> None:
        """Interim answers, then the final one; what is behind it is body already."""
        self._sending.forget()
        data = self._partial + data
        try:
            while (end := data.find(b"\r\n\r\n") + 4) > 3:
                head, data = http1.answer(data[:end]), data[end:]
                if head.status >= 200:
                    self._partial = b""
                    self._begin_answer(head, data)
                    return
                if head.switches:
                    self._switch(head, data)
                    return
                if not self._head.old:  # RFC 9110, 15.2: HTTP/1.0 knows none
                    self._client.write(head.forward(close=False))
            if len(data) > 2 * http1.LARGEST_HEAD:
                raise Malformed("the head is too large")
        except Malformed as error:
            self._fail("broken", error)
            return
        self._partial = data

    def _begin_answer(self, head: AnswerHead, data: bytes) -> None:
        self._sending.show(too_large=True)  # if the engine has not waited for the body
        if head.bodiless(self._head.method):
            self._outgoing = Length(0)
        elif head.chunked:
            self._outgoing = Chunked()
        elif head.length is not None:
            self._outgoing = Length(head.length)
        else:
            self._outgoing = UntilClose()
            self._client.leaving = True
        if not head.persistent and not self._sending.complete:
            self._client.leaving = True
        self._keep = head.persistent and not self._client.half_closed and not isinstance(self._outgoing, UntilClose)
        hold = self._hooks.head(head.status, head.end_to_end())
        if self._sending.replaced and not self._outgoing.complete:
            self._rewriting = Rewriting(head, self._outgoing, hold=hold and head.length is not None)
            self._client.write(self._rewriting.begin(close=self._client.leaving))
        else:
            self._client.write(head.forward(close=self._client.leaving))
        if self._outgoing.complete:
            self._finish(clean=not data)
        elif data:
            self.answer(data)

    def _switch(self, head: AnswerHead, data: bytes) -> None:
        if not self._head.upgrade:
            raise Malformed("it switches protocols unasked")
        if not self._sending.complete:
            raise Malformed("it switches protocols within the request")
        self._hooks.head(head.status, head.end_to_end())
        self._client.write(head.forward(close=False) + data)
        self._client.leaving = self.tunnel = True
        self._client.done()  # what came behind the request goes through the tunnel

    def _finish(self, *, clean: bool) -> None:
        """The answer is complete."""
        self._keep = self._keep and clean
        self._over = True
        rest = self._end("complete")
        if self._rewriting is not None:
            self._client.write(self._rewriting.end(rest, close=self._client.leaving, failed=self._hooks.failed))
        if self._sending.complete:
            self._leave()

    def _leave(self) -> None:
        """Both messages are complete: the connections part."""
        connection, self._engine = self._engine, None
        if connection is not None:
            if self._keep:
                self._pool.give_back(connection)
            else:
                connection.abort()
        self._client.done()

    def engine_ended(self) -> None:
        self._engine_ended = True
        if self._client.half_closed:
            self._close_tunnel()
        else:
            self._client.write_eof()

    def engine_lost(self, connection: Connection, failure: Exception | None) -> None:
        self._engine = None
        if self._over:
            self._client.close()  # the engine did not want the rest of the request
        elif self.tunnel:
            self._end("complete")
            self._client.close()
        elif isinstance(self._outgoing, UntilClose) and failure is None:
            self._finish(clean=False)
            if not self._sending.complete:
                self._client.close()
        elif self._outgoing is not None:
            self._break_off(failure)
        elif connection.used and self._sending.repeatable and not self._retried and self._just_sent():
            # Kept connections may be closed by the engine in the very moment in which they are chosen. One that is lost
            # later was lost over this request, which must not be made twice (RFC 9110, 9.2.2).
            self._retried = True
            self._connect()
        else:
            self._fail("broken", failure)

    def _just_sent(self) -> bool:
        return asyncio.get_running_loop().time() - self._sent_at < RACE_S

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _fail(self, ending: Ending, failure: Exception | None) -> None:
        """There is no answer: the client gets a 502, unless it has gone and the engine with it."""
        self._drop()
        if self._client.half_closed and ending == "broken":
            self._end("aborted")
            self._client.close()
            return
        self._end(ending)
        code = "engine_unreachable" if ending == "unreachable" else "engine_broke_off"
        message = "the inference engine " + ("cannot be reached" if ending == "unreachable" else "gave no answer")
        logger.warning("%s: %s", message, str(failure or "") or type(failure).__name__)
        hint = "try again; if this lasts, check that the engine runs and that the tap's engine.url names it"
        self._client.refuse(502, code, message, hint, bodiless=self._head.method == "HEAD")

    def _break_off(self, failure: Exception | None) -> None:
        """A client must not take half an answer for a whole one."""
        self._drop()
        if not self._client.half_closed:
            logger.warning("the engine broke off its answer: %s", failure or "connection closed")
        rest = self._end("aborted" if self._client.half_closed else "broken")
        if self._rewriting is not None:
            self._client.write(self._rewriting.broken(rest, close=self._client.leaving))
        if isinstance(self._outgoing, UntilClose):
            self._client.reset()
        else:
            self._client.close()

    def _close_tunnel(self) -> None:
        """Both directions have ended."""
        connection, self._engine = self._engine, None
        if connection is not None:
            connection.user = None
            connection.transport.close()
        self._end("complete")
        self._client.close()

    def _end(self, ending: Ending) -> bytes:
        if self._ended:
            return b""
        self._ended = True
        return self._hooks.end(ending)

    def _drop(self) -> None:
        connection, self._engine = self._engine, None
        if connection is not None:
            connection.abort()
