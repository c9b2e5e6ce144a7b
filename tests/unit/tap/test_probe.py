from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from driftwatch.settings import EngineKind
from driftwatch.tap import probe as module
from driftwatch.tap.probe import Probe

VERSION = '{"version": "0.32.0"}'
Serve = Callable[[dict[str, str]], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start a server that answers these paths with these texts, and 404 otherwise."""
    runners: list[web.AppRunner] = []

    async def start(answers: dict[str, str]) -> str:
        async def answer(request: web.Request) -> web.Response:
            text = answers.get(request.path)
            status = int(text) if text and text.isdigit() else 200 if text else 404
            return web.Response(status=status, text=text, content_type="application/json")

        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def ask(url: str, kind: EngineKind = "auto") -> tuple[bool, Probe]:
    probe = Probe(url, kind)
    async with aiohttp.ClientSession() as session:
        return await probe.ask(session), probe


@pytest.mark.parametrize(
    ("answers", "kind", "deployment"),
    [
        ({"/version": VERSION}, "vllm", {"engine": "vllm", "version": "0.32.0"}),
        (
            {"/version": VERSION, "/v1/models": json.dumps({"data": [{"owned_by": "vllm"}]})},
            "vllm",
            {"engine": "vllm", "version": "0.32.0"},
        ),
        (
            {"/version": VERSION, "/v1/models": json.dumps({"data": [{"owned_by": "tensorrt_llm"}]})},
            "trtllm",
            {"engine": "trtllm", "version": "0.32.0"},
        ),
        ({"/server_info": '{"version": "0.5.23"}'}, "sglang", {"engine": "sglang", "version": "0.5.23"}),
        ({"/get_server_info": '{"tp_size": 1}'}, "sglang", {"engine": "sglang"}),
        ({}, "openai", {}),
        ({"/version": "not json"}, "openai", {}),
        ({"/version": '["0.32.0"]'}, "openai", {}),
    ],
)
async def test_engines(serve: Serve, answers: dict[str, str], kind: str, deployment: dict[str, str]) -> None:
    answered, probe = await ask(await serve(answers))
    assert answered
    assert (probe.kind, probe.deployment) == (kind, deployment)


async def test_a_given_kind_stays_and_learns_its_version(serve: Serve) -> None:
    _, probe = await ask(await serve({"/version": VERSION}), "trtllm")
    assert (probe.kind, probe.deployment) == ("trtllm", {"engine": "trtllm", "version": "0.32.0"})


async def test_no_answer_is_no_verdict(serve: Serve) -> None:
    answered, probe = await ask("http://127.0.0.1:9")
    assert (answered, probe.kind, probe.deployment) == (False, "auto", {})
    answered, probe = await ask(await serve({"/version": "503"}))
    assert (answered, probe.kind) == (False, "auto")


async def test_it_is_asked_again_until_it_answers_and_ever_after(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(module, "AGAIN_S", 0.02)
    answers = {"/version": "503"}
    probe = Probe(await serve(answers), "auto")
    task = asyncio.create_task(probe.run())

    async def until(expected: dict[str, str]) -> None:
        while probe.deployment != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    try:
        for version in ("1", "2"):
            answers["/version"] = json.dumps({"version": version})
            await asyncio.wait_for(until({"engine": "vllm", "version": version}), 5)
    finally:
        task.cancel()
