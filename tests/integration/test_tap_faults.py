"""What must never touch an exchange, or grow without bound: failing hooks, stalled readers, the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NoReturn

import pytest

from driftwatch.tap.asgi import Headers
from driftwatch.tap.hooks import Ending, Hooks, Request, Unread
from driftwatch.tap.memory import Memory
from driftwatch.tap.relay import Relay
from driftwatch.tap.upstream import Pool

POST = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"
STREAM = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"2\r\nab\r\n",
    b"1\r\nc\r\n3\r\ndef\r\n",
    b"0\r\nX: t\r\n\r\n",
)
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n", b"ab", b"cdef"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\n", b"ab", b"cdef"
HOOKS = ("open", "capture_bytes", "body", "sent", "again", "head", "chunk", "release", "end")


class Faulty:
    """Hooks that hold back one byte and write the rest in capitals, until one of them fails at its n-th call."""

    def __init__(self, failing: str, calls: int, rewrites: bool) -> None:
        self._failing = failing
        self._calls = calls
        self._rewrites = rewrites
        self._held = b""
        self._plain = False
        self.endings: list[tuple[Ending, bool]] = []
        self._step("open")

    def _step(self, name: str) -> None:
        if name == self._failing:
            self._calls -= 1
            if self._calls == 0:
                raise RuntimeError("broken on purpose")

    @property
    def capture_bytes(self) -> int:
        self._step("capture_bytes")
        return 1000

    def unread(self, reason: Unread) -> None:
        raise AssertionError(reason)

    def body(self, data: bytes) -> tuple[bytes, Headers] | None:
        self._step("body")
        assert data == b"hello"
        headers = [(b"host", b"x"), (b"content-length", b"7"), (b"connection", b"close")]
        return (b"changed", headers) if self._rewrites else None

    def sent(self) -> None:
        self._step("sent")

    def again(self, status: int, headers: Headers) -> bool:
        self._step("again")
        return False

    def head(self, status: int, headers: Headers) -> bool:
        self._step("head")
        self._plain = any(name == b"content-length" for name, _ in headers)
        return self._plain

    def chunk(self, data: bytes) -> bytes:
        self._step("chunk")
        out, self._held = (self._held + data)[:-1], (self._held + data)[-1:]
        if self._plain:  # all is held back
            self._held = out + self._held
            return b""
        return out.upper()

    def release(self) -> bytes:
        self._step("release")
        return self._held.upper()

    def end(self, ending: Ending, *, whole: bool) -> None:
        self.endings.append((ending, whole))
        self._step("end")


class Watcher:
    """What a test wants to be told."""

    memory = Memory(1_000_000)

    def __init__(self, open: Callable[[Request], Hooks], fault: Callable[[], None]) -> None:
        self._open = open
        self._fault = fault

    def open(self, request: Request) -> Hooks:
        return self._open(request)

    def fault(self) -> None:
        self._fault()

    def refused(self) -> None:
        raise AssertionError("nothing malformed was sent")


@contextlib.asynccontextmanager
async def relay(
    answer: tuple[bytes, ...], open: Callable[[Request], Hooks], fault: Callable[[], None], *, url: str = ""
) -> AsyncIterator[tuple[int, list[bytes]]]:
    watcher = Watcher(open, fault)
    bodies: list[bytes] = []
    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        head = await reader.readuntil(b"\r\n\r\n")
        bodies.append(await reader.readexactly(7 if b"content-length: 7" in head.lower() else 5))
        for piece in answer:
            if writer.transport.is_closing():  # the relay wanted no such answer
                break
            writer.write(piece)
            await asyncio.sleep(0.005)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    sock = socket.create_server(("127.0.0.1", 0))
    one = Relay(Pool(url or f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), watcher)
    await one.listen(sock)
    try:
        yield sock.getsockname()[1], bodies
    finally:
        await one.drain(1)
        server.close()
        await asyncio.wait_for(asyncio.gather(*filter(None, serving)), 5)


async def ask(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


def content(answer: bytes) -> bytes:
    """The body, read by its framing; fails unless it is whole."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"Content-Length: " in head:
        assert int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0]) == len(body)
    if b"chunked" not in head:
        return body
    out = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        if size == b"0":
            assert body == b"X: t\r\n\r\n"
            return out
        count = int(size, 16)
        assert body[count : count + 2] == b"\r\n"
        out, body = out + body[:count], body[count + 2 :]


@pytest.mark.parametrize("answer", [STREAM, PLAIN, UNTIL_CLOSE], ids=["stream", "plain", "until close"])
@pytest.mark.parametrize("rewrites", [False, True])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("failing", HOOKS)
async def test_a_fault_in_any_hook_costs_no_exchange(
    failing: str, calls: int, rewrites: bool, answer: tuple[bytes, ...]
) -> None:
    faults = 0
    hooks: list[Faulty] = []

    def fault() -> None:
        nonlocal faults
        faults += 1

    def open(request: Request) -> Hooks:
        hooks.append(Faulty(failing, calls, rewrites))
        return hooks[-1]

    async with relay(answer, open, fault) as (port, bodies):
        through = await ask(port, POST)
    happens = failing == "chunk" or (calls == 1 and (failing != "again" or rewrites))
    assert faults == happens
    changed = rewrites and not (calls == 1 and failing in ("open", "capture_bytes", "body"))
    # Where nobody can change the answer back, the request goes once more as it was.
    once_more = changed and calls == 1 and failing in ("sent", "again")
    assert bodies == ([b"changed", b"hello"] if once_more else [b"changed" if changed else b"hello"])
    changed = changed and not once_more
    if not changed:
        head, _, rest = answer[0].partition(b"\r\n\r\n")
        assert through == head + b"\r\nConnection: close\r\n\r\n" + rest + b"".join(answer[1:])
    elif failing == "release" and happens and answer is not PLAIN:
        assert content(through).lower() == b"abcde", "what a hook keeps for itself cannot be had"
    else:
        assert content(through).lower() == b"abcdef"
    if hooks and failing not in ("open", "capture_bytes"):
        assert hooks[0].endings == [("complete", not happens or failing == "end")]


async def test_counting_a_fault_may_fail_too() -> None:
    def fail(*_: object) -> NoReturn:
        raise RuntimeError("broken on purpose")

    async with relay(PLAIN, fail, fail) as (port, _):
        assert content(await ask(port, POST)) == b"abcdef"


# --- TLS and IPv6 -----------------------------------------------------------------------------------------------------


class Silent:
    capture_bytes = 0

    def body(self, data: bytes) -> None: ...

    def unread(self, reason: Unread) -> None: ...

    def sent(self) -> None: ...

    def again(self, status: int, headers: Headers) -> bool:
        return False

    def head(self, status: int, headers: Headers) -> bool:
        return False

    def chunk(self, data: bytes) -> bytes:
        return data

    def release(self) -> bytes:
        return b""

    def end(self, ending: Ending, *, whole: bool) -> None: ...


async def echo_length(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0])
            body = b"%d" % len(await reader.readexactly(length))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()


@pytest.mark.parametrize("where", ["ipv6", "https", "https, unknown certificate", "prefix"])
async def test_engines_behind_tls_ipv6_or_a_path(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, context, scheme = "127.0.0.1", None, "http"
    if where == "ipv6":
        host = "::1"
    if where.startswith("https"):
        key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
        await asyncio.to_thread(
            subprocess.run, [*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        scheme = "https"
        if where == "https":
            monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    try:
        server = await asyncio.start_server(echo_length, host, 0, ssl=context)
    except OSError:
        pytest.skip("no IPv6 here")
    address = "[::1]" if where == "ipv6" else host
    url = f"{scheme}://{address}:{server.sockets[0].getsockname()[1]}" + ("/base" if where == "prefix" else "")
    async with relay((), lambda _: Silent(), lambda: None, url=url) as (port, _):
        for size in (5, 300_000):
            head = POST.partition(b"Content-Length")[0]
            request = head + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % size + b"x" * size
            answer = await ask(port, request)
            if where == "https, unknown certificate":
                assert answer.startswith(b"HTTP/1.1 502 ")
            else:
                assert answer.endswith(b"\r\n\r\n%d" % size)
    server.close()
    await server.wait_closed()


# --- memory -----------------------------------------------------------------------------------------------------------

STALLED = 500
LARGE = 10_000_000
CAPTURE = 100_000
"""What is recorded of an exchange is kept until it ends: so much more for each."""


@contextlib.asynccontextmanager
async def tap_process(engine: int, **settings: object) -> AsyncIterator[tuple[int, int]]:
    """A tap as a process of its own: its port and its process id. Settings are named as in the environment."""
    port, admin = free_port(), free_port()
    environment = os.environ | {
        "DRIFTWATCH_ENGINE__URL": f"http://127.0.0.1:{engine}",
        "DRIFTWATCH_ENGINE__KIND": "openai",
        "DRIFTWATCH_TAP__LISTEN": f"127.0.0.1:{port}",
        "DRIFTWATCH_TAP__ADMIN": f"127.0.0.1:{admin}",
        **{f"DRIFTWATCH_{name}": str(value) for name, value in settings.items()},
    }
    command = [sys.executable, "-m", "driftwatch", "tap"]
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            assert process.returncode is None, "it ended"
            await asyncio.sleep(0.05)
        yield port, process.pid
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_stalled_readers_of_large_answers_cost_bounded_memory() -> None:
    """500 clients that ask for 10 MB each and do not read; then one that does, past them."""
    requests = [
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode()
        for path in ("/v1/chat/completions", "/other")
    ]
    body = b"x" * LARGE
    written = blocked = 0
    serving: list[asyncio.Task[None] | None] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written, blocked
        serving.append(asyncio.current_task())
        writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, RuntimeError):
            await reader.readuntil(b"\r\n\r\n{}")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % LARGE)
            for first in range(0, LARGE, 50_000):
                writer.write(body[first : first + 50_000])
                blocked += 1
                try:
                    await writer.drain()
                finally:
                    blocked -= 1
                written += 50_000
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024)
    loop = asyncio.get_running_loop()
    settings = {"TAP__CAPTURE_BYTES": CAPTURE}
    async with tap_process(server.sockets[0].getsockname()[1], **settings) as (port, pid):
        before = rss(pid)
        socks = []
        for number in range(STALLED):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", port))
            await loop.sock_sendall(sock, requests[number % 2])
            socks.append(sock)
        grown, seen = 0, -1
        while blocked < STALLED or seen != written:  # until nothing moves any more
            seen = written
            await asyncio.sleep(0.5)
            grown = max(grown, rss(pid) - before)
        assert written < STALLED * LARGE / 2, "they are stalled"
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        writer.write(requests[0])
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(LARGE) == body
        writer.close()
        for sock in socks:
            sock.close()
    server.close()
    for writer in writers:  # some are not told that the tap is gone until they have room to write again
        writer.transport.abort()
    await asyncio.gather(*filter(None, serving))
    assert grown < STALLED * (200_000 + CAPTURE)
