"""The tap as a process: two listeners in one event loop, its background tasks, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any

import uvicorn

from driftwatch.errors import DriftwatchError
from driftwatch.settings import Settings, host_port, secret
from driftwatch.tap.admin import Admin
from driftwatch.tap.budget import Budget
from driftwatch.tap.harvest import Harvest
from driftwatch.tap.memory import Memory
from driftwatch.tap.metrics import Metrics
from driftwatch.tap.probe import Probe
from driftwatch.tap.recorder import Recorder
from driftwatch.tap.relay import Relay
from driftwatch.tap.sampler import Sampler
from driftwatch.tap.scraper import Scraper
from driftwatch.tap.segments import Segments
from driftwatch.tap.shipper import Shipper
from driftwatch.tap.upstream import Pool
from driftwatch.wire.exchange import Exchange

logger = logging.getLogger(__name__)

FLUSH_S = 5.0
"""Seconds that control gets to take the last samples."""
RESTART_S = 1.0
SWITCH_S = 0.0005


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises DriftwatchError if the settings cannot be served."""
    tap = Tap(settings)
    # The thread that parses samples would else keep the loop waiting for 5 ms, and a full collection for longer.
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve_until_signal(tap))


class Tap:
    """All parts of one tap. Its sockets are bound at once; :meth:`serve` runs it until :meth:`stop`."""

    def __init__(self, settings: Settings) -> None:
        control = settings.control
        self._settings = settings
        self._token = secret(control.token, control.token_file, "control.token_file")
        engine = settings.engine
        self._engine_token = secret(engine.token, engine.token_file, "engine.token_file")
        self.metrics = Metrics()
        self._segments = Segments(settings.segments, max_segments=control.max_segments, freed=self.metrics.forget)
        self._stop = asyncio.Event()
        self._serving = False
        relay = _bind("tap.listen", settings.tap.listen)
        try:
            self.sockets = relay, _bind("tap.admin", settings.tap.admin)
        except DriftwatchError:
            relay.close()
            raise

    @property
    def ready(self) -> bool:
        return self._serving and not self._stop.is_set()

    @property
    def ports(self) -> tuple[int, int]:
        """The ports of the relay and of the admin listener."""
        relay, admin = (sock.getsockname()[1] for sock in self.sockets)
        return relay, admin

    def stop(self) -> None:
        """End in order: not ready first, then streams in flight, then the last samples."""
        self._stop.set()

    async def serve(self) -> None:
        """Serve until stopped, then drain."""
        settings = self._settings
        probe = Probe(settings.engine.url, settings.engine.kind, self._engine_token)
        engine = settings.engine
        scraper = Scraper(engine.url, probe, interval_s=engine.metrics_interval_s, drained=engine.drained_metrics)
        scraper.register(self.metrics.registry)
        sampling, control_url = settings.sampling, settings.tap.control_url
        budget = Budget(control_url, sampling.per_window, every_s=max(sampling.window_s, 1.0), token=self._token)
        sampler = Sampler[Exchange](budget.room, sampling.window_s)
        shipper = Shipper(control_url, queue=settings.tap.queue, token=self._token, metrics=self.metrics)
        harvest = Harvest(sampler, shipper, self.metrics, running=scraper.running)
        recorder = Recorder(
            settings.tap.capture_bytes, self._segments, sampler, probe, self.metrics, Memory(settings.tap.memory_bytes)
        )
        relay = Relay(Pool(settings.engine.url), recorder)
        admin = _server(Admin(self.metrics.registry, lambda: self.ready))
        async with _background(probe.run, shipper.run, scraper.run, budget.run), _served(admin, self.sockets[1]):
            async with _background(harvest.run, relay.sweep):
                await relay.listen(self.sockets[0])
                self._serving = True
                logger.info("relaying %s to %s", settings.tap.listen, settings.engine.url)
                await self._stop.wait()
                await asyncio.sleep(settings.tap.notice_s)  # who sends here learns first that it is not ready
                await relay.drain(settings.tap.drain_s)
            await asyncio.sleep(0)  # the last exchanges settle
            await harvest.flush()
            await shipper.drain(FLUSH_S)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which are the tap's, and with a word when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        finally:
            self.listening.set()  # nobody shall wait for a server that failed

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _server(app: Callable[..., Any]) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            date_header=False,
            server_header=False,
            proxy_headers=False,
            log_config=None,
            log_level=logging.CRITICAL,
            timeout_graceful_shutdown=0,
        )
    )


@contextlib.asynccontextmanager
async def _served(server: _Server, sock: socket.socket) -> AsyncIterator[None]:
    """A server that runs inside the block; leaving it waits for requests in flight."""
    task = asyncio.create_task(server.serve([sock]))
    try:
        await server.listening.wait()
        yield
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def _background(*jobs: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Tasks that run inside the block."""
    tasks = [asyncio.create_task(_for_ever(job)) for job in jobs]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _for_ever(job: Callable[[], Awaitable[None]]) -> None:
    """Begin a job again whose code fails: requests are relayed all the same, and nothing else shall stop with it."""
    while True:
        try:
            await job()
        except Exception:
            logger.exception("a background task failed; it begins again in %g s", RESTART_S)
        await asyncio.sleep(RESTART_S)


async def _serve_until_signal(tap: Tap) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, tap.stop)
    await tap.serve()


def _bind(key: str, listen: str) -> socket.socket:
    host, port = host_port(listen)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise DriftwatchError(
            f"`{key}`: cannot listen on {listen}: {error.strerror or error}; free the port or name another"
        ) from None


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop
