"""The demo's users: two tenants that chat through the tap, one of which changes its mind half-way."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import aiohttp

from driftwatch.demo.prompts import prompts
from driftwatch.errors import DriftwatchError

Kind = Literal["code", "chat"]

SHIFTING, STEADY = "acme", "globex"
MAX_TOKENS = 32
CONCURRENCY = 16


@dataclass(frozen=True)
class Request:
    """One chat request; ``index`` counts requests as they are sent."""

    index: int
    tenant: str
    kind: Kind
    prompt: str

    @property
    def id(self) -> str:
        return f"demo-{self.index:05d}"


def plan(requests: int, *, seed: int, shift: bool, further: int = 0) -> tuple[list[Request], int]:
    """The traffic, and the index of the first request after the shift.

    Both tenants start with the kind of prompts that the draft was trained for; from half-way on one sends the other.
    ``further`` requests follow, like those of the second half.
    """
    rng = random.Random(seed)
    middle = requests // 2
    stock = {kind: _shuffled(kind, rng) for kind in ("code", "chat")}
    planned = []
    for index in range(requests + further):
        tenant = SHIFTING if rng.random() < 2 / 3 else STEADY
        kind: Kind = "chat" if shift and tenant == SHIFTING and index >= middle else "code"
        prompt = stock[kind][index % len(stock[kind])]
        planned.append(Request(index, tenant, kind, prompt))
    return planned, middle


def _shuffled(kind: Literal["code", "chat"], rng: random.Random) -> list[str]:
    found = prompts(kind, "traffic")
    return rng.sample(found, len(found))


class Users:
    """Send what is planned through the tap, in order, some at a time, half of it streaming."""

    def __init__(self, url: str, model: str, planned: Sequence[Request], say: Callable[[str], None]) -> None:
        self.url, self.model, self.say = url, model, say
        self._waiting = iter(planned)
        self.sent: list[Request] = []
        self._answered, self._started = 0, time.monotonic()

    async def send(self, count: int) -> None:
        """The next so many requests; fewer where nothing more is planned.

        Raises DriftwatchError when one fails: the tap must never cost a request.
        """
        slots = asyncio.Semaphore(CONCURRENCY)
        try:
            async with aiohttp.ClientSession() as client, asyncio.TaskGroup() as group:
                for request in islice(self._waiting, count):
                    self.sent.append(request)
                    await slots.acquire()
                    group.create_task(self._ask(client, request)).add_done_callback(lambda _: slots.release())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _ask(self, client: aiohttp.ClientSession, request: Request) -> None:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": request.prompt}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": request.index % 2 == 0,
        }
        headers = {"x-tenant": request.tenant, "x-request-id": request.id}
        try:
            async with client.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as response:
                answer = await response.read()
        except aiohttp.ClientError as error:
            raise DriftwatchError(f"request {request.id} was not answered: {error}") from error
        if response.status != 200:
            raise DriftwatchError(f"request {request.id} was answered {response.status}: {answer[:200]!r}")
        self._answered += 1
        if self._answered % 20 == 0:
            self.say(f"{self._answered} requests answered, {time.monotonic() - self._started:.0f} s")
