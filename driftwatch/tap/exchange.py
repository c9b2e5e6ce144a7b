"""One request and its answer on their way between a client's connection and one to the engine."""

from __future__ import annotations

import logging

from driftwatch.tap.attempts import Attempts
from driftwatch.tap.hooks import Ending, Guard, Request, Watcher
from driftwatch.tap.http1 import AnswerHead, Malformed, RequestHead
from driftwatch.tap.receiving import Receiving
from driftwatch.tap.sending import Sending
from driftwatch.tap.sides import Client
from driftwatch.tap.upstream import Connection, Pool

logger = logging.getLogger(__name__)


class Exchange:
    """Passes bytes both ways, follows both framings, and tells the hooks."""

    def __init__(self, client: Client, pool: Pool, head: RequestHead, watcher: Watcher) -> None:
        self._client = client
        self._pool = pool
        self._head = head
        self._hooks = Guard(watcher, Request(head.method, head.path, head.lines))
        self._sending = Sending(head, self._hooks, pool.prefix, watcher.memory)
        self._receiving = Receiving(self._hooks, watcher.memory)
        self._attempts = Attempts(pool, self)
        self._engine: Connection | None = None
        self._going = self._over = self._ended = self._engine_ended = self.tunnel = False
        self._keep = False
        self.quiet_s = 0.0
        """So long nothing has come from either side; counted by who asks."""

    # --- from the client ----------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """The request has been read to its end."""
        return self._sending.complete

    @property
    def answering(self) -> bool:
        """The client has got a part of the final answer."""
        return self._receiving.begun

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
        self.quiet_s = 0.0
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

    def cancel(self, ending: Ending = "aborted") -> None:
        """The client has gone, or must go: the engine's connection is closed, so that it stops."""
        self._drop()
        self._end("complete" if self.tunnel else ending)

    # --- to the engine ------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if not self._sending.held and self._engine is None and not self._ended:
            self._attempts.begin()

    def use(self, connection: Connection) -> None:
        self._engine = connection
        connection.user = self
        self._client.engine_full(False)
        connection.transport.write(self._sending.so_far())
        if self._client.full:
            connection.transport.pause_reading()
        if not self._attempts.again:
            self._hooks.sent()
        if self._client.half_closed:
            self.half_close()

    def unreachable(self, failure: Exception) -> None:
        self._fail("unreachable", failure)

    # --- from the engine ----------------------------------------------------------------------------------------------

    def engine_full(self, full: bool) -> None:
        self._client.engine_full(full)

    def answer(self, data: bytes) -> None:
        self.quiet_s = 0.0
        client, receiving = self._client, self._receiving
        if self.tunnel:
            client.write(data)
            return
        try:
            if not receiving.begun:
                self._read_heads(data)
                return
            if self._over:
                self._keep = False  # nobody asked
                return
            out, taken = receiving.take(data, close=client.leaving)
        except Malformed as error:
            if receiving.begun:
                self._break_off(error)
            else:
                self._fail("broken", error)
            return
        if out:
            client.write(out)
        if receiving.complete:
            self._finish(clean=taken == len(data))

    def _read_heads(self, data: bytes) -> None:
        """Interim answers, then the final one; what is behind it is body already. Raises Malformed."""
        self._sending.answered()
        while (found := self._receiving.head(data)) is not None:
            head, data = found
            if head.status >= 200:
                self._begin_answer(head, data)
                return
            if head.switches:
                self._switch(head, data)
                return
            if not self._head.old:  # RFC 9110, 15.2: HTTP/1.0 knows none
                self._client.write(head.forward(close=False))
            if not data:
                return

    def _begin_answer(self, head: AnswerHead, data: bytes) -> None:
        if self._sending.replaced and self._hooks.again(head.status, head.end_to_end()):
            self._drop()
            self._sending.restore()
            self._attempts.repeat()
            return
        self._sending.skip("too_large")  # if the engine has not waited for the body
        self._sending.forget()
        receiving = self._receiving
        receiving.frame(head, self._head.method)
        if receiving.until_close or not (head.persistent or self._sending.complete):
            self._client.leaving = True
        self._keep = head.persistent and not self._client.half_closed and not receiving.until_close
        self._client.write(receiving.begin(head, replaced=self._sending.replaced, close=self._client.leaving))
        if receiving.complete:
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
        if out := self._receiving.end(close=self._client.leaving):
            self._client.write(out)
        self._end("complete")
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

    def engine_lost(self, failure: Exception | None, *, used: bool) -> None:
        self._engine = None
        if self._over:
            self._client.close()  # the engine did not want the rest of the request
        elif self.tunnel:
            self._end("complete")
            self._client.close()
        elif self._receiving.until_close and failure is None:
            self._finish(clean=False)
            if not self._sending.complete:
                self._client.close()
        elif self._receiving.begun:
            self._break_off(failure)
        elif used and self._sending.repeatable and self._attempts.raced():
            self._attempts.repeat()
        else:
            self._fail("broken", failure)

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
        if out := self._receiving.broken(close=self._client.leaving):
            self._client.write(out)
        self._end("aborted" if self._client.half_closed else "broken")
        if self._receiving.until_close:
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

    def _end(self, ending: Ending) -> None:
        if self._ended:
            return
        self._ended = True
        self._attempts.stop()
        self._sending.close()
        self._receiving.close()
        self._hooks.end(ending)

    def _drop(self) -> None:
        connection, self._engine = self._engine, None
        if connection is not None:
            connection.abort()
