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
MODELS = '{"data": [{"owned_by": "vllm"}]}'
SERVER_INFO = json.dumps(
    {
        "model_path": "meta-llama/Llama-3.1-8B-Instruct",
        "quantization": None,
        "kv_cache_dtype": "auto",
        "tp_size": 1,
        "return_input_ids": False,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "lmsys/sglang-EAGLE3-LLaMA3.1-Instruct-8B",
        "speculative_draft_model_quantization": None,
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
        "speculative_adaptive": False,
        "internal_states": [{"avg_spec_accept_length": 2.64, "speculative_num_steps": 3}],
        "version": "0.5.23",
    }
)
"""The keys of SGLang 0.5.23 that matter here: its resolved settings, flat, with the version beside them."""
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
        ({"/version": VERSION}, "openai", {}),
        ({"/version": VERSION, "/v1/models": json.dumps({"data": [{"owned_by": "me"}]})}, "openai", {}),
        (
            {"/version": VERSION, "/metrics": '"vllm:num_requests_running"'},
            "vllm",
            {"engine": "vllm", "version": "0.32.0"},
        ),
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
        ({"/get_server_info": '{"tp_size": 1}'}, "sglang", {"engine": "sglang", "parallelism": "1"}),
        (
            {"/server_info": SERVER_INFO},
            "sglang",
            {
                "engine": "sglang",
                "version": "0.5.23",
                "target": "meta-llama/Llama-3.1-8B-Instruct",
                "draft": "lmsys/sglang-EAGLE3-LLaMA3.1-Instruct-8B",
                "kv_cache_dtype": "auto",
                "parallelism": "1",
                "speculative_algorithm": "EAGLE3",
                "speculative_num_steps": "3",
                "speculative_eagle_topk": "1",
                "speculative_num_draft_tokens": "4",
                "speculative_accept_threshold_single": "1.0",
                "speculative_accept_threshold_acc": "1.0",
            },
        ),
        (
            {
                "/version": VERSION,
                "/v1/models": json.dumps({"data": [{"id": "m", "root": "org/model", "owned_by": "vllm"}]}),
            },
            "vllm",
            {"engine": "vllm", "version": "0.32.0", "target": "org/model"},
        ),
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
    answers = {"/version": "503", "/v1/models": MODELS}
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


async def test_facts_in_doubt_are_none_until_the_engine_has_answered(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade is one change: the new fingerprint never comes with the old version."""
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.01)
    answers = {"/version": json.dumps({"version": "1"}), "/v1/models": MODELS}
    probe = Probe(await serve(answers), "auto")
    task = asyncio.create_task(probe.run())

    async def until_known(version: str) -> None:
        while probe.deployment.get("version") != version:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    try:
        await asyncio.wait_for(until_known("1"), 5)
        probe.learn({"kv_cache_dtype": "fp8"})
        for fingerprint in ("a", None, "a"):
            assert probe.facts(fingerprint) == {"engine": "vllm", "version": "1", "kv_cache_dtype": "fp8"}
        answers["/version"] = json.dumps({"version": "2"})
        assert probe.facts("b") == {"engine": "vllm"}
        await asyncio.wait_for(until_known("2"), 5)
        assert probe.facts("b") == {"engine": "vllm", "version": "2"}
        answers["/version"] = json.dumps({"version": "3"})
        probe.doubt()
        assert probe.facts("b") == {"engine": "vllm"}
        await asyncio.wait_for(until_known("3"), 5)
    finally:
        task.cancel()


@pytest.mark.parametrize(
    ("change", "verification"),
    [
        ({}, None),
        ({"speculative_accept_threshold_single": 1}, None),
        ({"speculative_accept_threshold_single": 0.9}, "lossy"),
        ({"speculative_accept_threshold_acc": 0.5}, "lossy"),
        ({"speculative_use_block_verification": True}, "block"),
    ],
)
async def test_lossy_and_block_verification_are_facts(
    serve: Serve, change: dict[str, object], verification: str | None
) -> None:
    _, probe = await ask(await serve({"/server_info": json.dumps(json.loads(SERVER_INFO) | change)}))
    assert probe.deployment.get("verification") == verification


async def test_an_engine_with_an_api_key_is_asked_with_it(caplog: pytest.LogCaptureFixture) -> None:
    """As SGLang does it: everything but health and metrics wants the key."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/metrics":
            return web.Response(text="sglang:num_running_reqs 0\n")
        if request.headers.get("authorization") != "Bearer sk-secret":
            return web.Response(status=401)
        found = request.path == "/server_info"
        return web.Response(status=200 if found else 404, text=SERVER_INFO, content_type="application/json")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with aiohttp.ClientSession() as session:
        keyed = Probe(url, "auto", "sk-secret")
        assert await keyed.ask(session)
        assert (keyed.kind, keyed.deployment["version"], caplog.records) == ("sglang", "0.5.23", [])
        barred = Probe(url, "auto")
        for _ in range(2):
            assert await barred.ask(session)
    assert (barred.kind, barred.deployment) == ("sglang", {"engine": "sglang"})
    (warning,) = caplog.records
    assert "engine.token" in warning.getMessage()
    assert "secret" not in caplog.text
    await runner.cleanup()
