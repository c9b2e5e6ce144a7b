"""What real engines take: sampled prompts sent as streams, few at a time, with a clock on every answer.

Speaks the OpenAI routes that vLLM, SGLang and TensorRT-LLM share. Times are a client's: from sending to the first
token, and from there to the last. The number of tokens is the engine's own (``usage``), since with speculation one
chunk holds several.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import httpx
import orjson

from driftwatch.errors import DriftwatchError
from driftwatch.evaluate.request import Clock
from driftwatch.records import Record
from driftwatch.wire.sse import Parser

BLOCKS = 4
"""Turns that two engines take: what else happens on their machines hits both."""

LONGEST_ANSWER = 1024
LONGEST_WAIT_S = 300.0


@dataclass(frozen=True)
class Limits:
    """What an engine is asked to bear."""

    requests: int
    """At most so many, and one to warm up."""
    concurrency: int
    rate: float | None = None
    """Requests started in a second at most."""


@dataclass(frozen=True)
class Prompt:
    """A record of the sample to be sent, and its place there."""

    place: int
    record: Record
    tokens: int
    """Of the recorded answer, which the new one may not exceed."""


@dataclass(frozen=True)
class Timed:
    """What came of one prompt at one engine."""

    place: int
    clock: Clock | None
    failed: str | None = None


def measure(
    urls: Sequence[str],
    prompts: Sequence[Prompt],
    limits: Limits,
    done: Callable[[], object] = lambda: None,
    warm: Prompt | None = None,
) -> list[list[Timed]]:
    """For each engine what came of each prompt. Engines take turns, block by block, in alternating order.

    ``warm`` is asked first and not counted, which leaves an engine's prefix cache cold for the others; without it the
    first prompt is asked twice. Raises DriftwatchError with one line if an engine cannot be reached or answers its
    first request wrongly.
    """
    return asyncio.run(_measure(urls, prompts, limits, done, warm or prompts[0]))


async def _measure(
    urls: Sequence[str], prompts: Sequence[Prompt], limits: Limits, done: Callable[[], object], warm: Prompt
) -> list[list[Timed]]:
    found: list[list[Timed]] = [[] for _ in urls]
    pool = httpx.Limits(max_connections=limits.concurrency)
    async with httpx.AsyncClient(timeout=LONGEST_WAIT_S, limits=pool, trust_env=False) as client:
        engines = [_Engine(client, url.rstrip("/")) for url in urls]
        for engine in engines:
            await engine.begin(warm)
        size = max(1, -(-len(prompts) // BLOCKS))
        orders = cycle([list(enumerate(engines)), list(enumerate(engines))[::-1]])
        for start, order in zip(range(0, len(prompts), size), orders, strict=False):
            for index, engine in order:
                found[index] += await _block(engine, prompts[start : start + size], limits, done)
    return found


async def _block(engine: _Engine, prompts: Sequence[Prompt], limits: Limits, done: Callable[[], object]) -> list[Timed]:
    gate = asyncio.Semaphore(limits.concurrency)

    async def one(prompt: Prompt) -> Timed:
        try:
            result = await engine.ask(prompt)
        finally:
            gate.release()
        done()
        return result

    tasks = []
    for prompt in prompts:
        await gate.acquire()
        tasks.append(asyncio.create_task(one(prompt)))
        if limits.rate is not None:
            await asyncio.sleep(1.0 / limits.rate)
    return await asyncio.gather(*tasks)


class _Engine:
    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client, self._url = client, url
        self._model = ""

    async def begin(self, prompt: Prompt) -> None:
        """Ask which model it serves, and for one answer that is not counted: the first is slower."""
        try:
            models = await self._client.get(f"{self._url}/v1/models", timeout=30.0)
            self._model = str(models.raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise DriftwatchError(
                f"engine {self._url}: /v1/models: {reason}; is it an OpenAI-compatible server?"
            ) from None
        if (first := await self.ask(prompt)).failed is not None:
            raise DriftwatchError(f"engine {self._url}: the first request failed: {first.failed}")

    async def ask(self, prompt: Prompt) -> Timed:
        path, body = _request(prompt, self._model)
        watch = _Watch(chat=path.endswith("chat/completions"))
        try:
            async with self._client.stream("POST", self._url + path, json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread())[:200].decode(errors="replace")
                    return Timed(prompt.place, None, f"{response.status_code} {' '.join(text.split())}")
                parser = Parser()
                async for data in response.aiter_bytes():
                    now = time.perf_counter()
                    for event in parser.feed(data):
                        watch.see(event.data, now)
        except httpx.HTTPError as error:
            return Timed(prompt.place, None, str(error) or type(error).__name__)
        return watch.result(prompt.place)


class _Watch:
    """The clock on one stream."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._sent = time.perf_counter()
        self._first: float | None = None
        self._last = 0.0
        self._tokens: int | None = None
        self._error: str | None = None

    def see(self, data: bytes | None, now: float) -> None:
        """One event of the stream, and when it came."""
        if data is None or data == b"[DONE]":
            return
        try:
            chunk: Any = orjson.loads(data)
        except orjson.JSONDecodeError:
            return
        if not isinstance(chunk, dict):
            return
        if "error" in chunk:
            self._error = str(chunk["error"])[:200]
        if isinstance(usage := chunk.get("usage"), dict):
            self._tokens = usage.get("completion_tokens")
        for choice in chunk.get("choices") or ():
            if self._first is None and self._chat and not any(_said(choice.get("delta"))):
                continue  # the role alone is no token
            self._first = now if self._first is None else self._first
            self._last = now

    def result(self, place: int) -> Timed:
        if self._error is not None:
            return Timed(place, None, self._error)
        if self._first is None or self._tokens is None:
            return Timed(place, None, "no token" if self._first is None else "the stream gave no usage")
        if self._tokens < 2 or self._last <= self._first:
            return Timed(place, None, "too_short")
        return Timed(place, Clock(self._first - self._sent, self._last - self._first, self._tokens - 1))


def _said(delta: Any) -> list[Any]:
    if not isinstance(delta, dict):
        return []
    return [value for name, value in delta.items() if name != "role"]


def _request(prompt: Prompt, model: str) -> tuple[str, dict[str, Any]]:
    """The recorded request again, as a stream: token ids where there are any, with the sampling that is known."""
    record = prompt.record
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": min(prompt.tokens, LONGEST_ANSWER),
        "temperature": record.temperature or 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if record.top_p is not None:
        body["top_p"] = record.top_p
    if record.prompt_token_ids is None and record.messages is not None:
        return "/v1/chat/completions", body | {"messages": record.messages}
    return "/v1/completions", body | {"prompt": record.prompt_token_ids or record.prompt}


def failures(found: Sequence[Timed]) -> Counter[str]:
    """Why prompts have no clock."""
    return Counter(one.failed for one in found if one.failed is not None)
