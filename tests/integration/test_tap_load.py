"""The engine's load goes with the samples: from its metrics through a whole tap into the records that control takes."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

from .test_tap import BODY, CHAT, bench

METRICS = "\n".join(
    f'vllm:num_requests_running{{engine="{engine}",model_name="m"}} {n}.0' for engine, n in ((0, 5), (1, 8))
)
ANSWER = {"choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}]}


async def test_samples_carry_the_load_of_their_engine() -> None:
    async with bench(vllm=True, engine={"metrics_interval_s": 0.05}, sampling={"window_s": 0.2}) as b:

        async def handler(request: web.Request) -> web.StreamResponse:
            b.engine.bodies.append(await request.read())
            return web.Response(text=METRICS) if request.path == "/metrics" else web.json_response(ANSWER)

        b.engine.handler = handler
        running = "driftwatch_live_engine_requests_running"
        labels = {"instance": b.engine.url.removeprefix("http://"), "engine": "1", "model": "m"}
        async with asyncio.timeout(20):
            while b.tap.metrics.registry.get_sample_value(running, labels) != 8.0:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await b.ask(b.url, "POST", CHAT, data=json.dumps(BODY), headers={"content-type": "application/json"})
            while not b.control.records:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    (record,) = b.control.records
    assert record["engine"]["running"] == 6.5
