"""The demo's users: two tenants that chat through the tap, one of which changes its mind half-way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def plan(requests: int, *, seed: int, shift: bool) -> tuple[list[Request], int]:
    """The traffic, and the index of the first request after the shift.

    Both tenants start with the kind of prompts that the draft was trained for; from half-way on one sends the other.
    """
    rng = random.Random(seed)
    middle = requests // 2
    stock = {kind: _shuffled(kind, rng) for kind in ("code", "chat")}
    planned = []
    for index in range(requests):
        tenant = SHIFTING if rng.random() < 2 / 3 else STEADY
        kind: Kind = "chat" if shift and tenant == SHIFTING and index >= middle else "code"
        prompt = stock[kind][index % len(stock[kind])]
        planned.append(Request(index, tenant, kind, prompt))
    return planned, middle


def _shuffled(kind: Literal["code", "chat"], rng: random.Random) -> list[str]:
    found = prompts(kind, "traffic")
    return rng.sample(found, len(found))


async def drive(url: str, model: str, requests: Sequence[Request], on_answer: Callable[[int], None]) -> None:
    """Send every request through the tap, in order, some at a time, half of them streaming.

    Raises DriftwatchError when one fails: the tap must never cost a request.
    """
    slots = asyncio.Semaphore(CONCURRENCY)
    done = 0
    async with aiohttp.ClientSession() as client, asyncio.TaskGroup() as group:

        async def send(request: Request) -> None:
            nonlocal done
            try:
                await _chat(client, url, model, request)
            finally:
                slots.release()
            done += 1
            on_answer(done)

        for request in requests:
            await slots.acquire()
            group.create_task(send(request))


async def _chat(client: aiohttp.ClientSession, url: str, model: str, request: Request) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": request.prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": request.index % 2 == 0,
    }
    headers = {"x-tenant": request.tenant, "x-request-id": request.id}
    async with client.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        answer = await response.read()
        if response.status != 200:
            raise DriftwatchError(f"request {request.id} was answered {response.status}: {answer[:200]!r}")
