"""An engine that answers as a real one was recorded: run as a process of its own, `python engine.py PORT TRACE [S S]`.

Each prompt of the trace is answered with the tokens that vLLM 0.32 served for it, in vLLM's wire format, as a stream of
one chunk a verify step where a stream is asked for. Token ids are in the answer only if the request asks for them, the
request's own figures are beside the usage, and ``/metrics`` sums them up. Two numbers make it slow: seconds before the
first chunk, and before each further one.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

IDS = ("token_ids", "prompt_token_ids")
FIGURES = {"num_spec_steps": "windows", "num_draft_tokens": "drafted", "num_accepted_draft_tokens": "accepted"}
COUNTERS = {"num_drafts": "windows", "num_draft_tokens": "drafted", "num_accepted_tokens": "accepted"}


class RecordedEngine:
    def __init__(self, trace: Path, first_s: float = 0.0, chunk_s: float = 0.001) -> None:
        self.first_s, self.chunk_s = first_s, chunk_s
        records = [json.loads(line) for line in trace.read_text().splitlines()]
        self.answers = {tuple(record["prompt_token_ids"]): record for record in records}
        self.served: list[dict[str, Any]] = []

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def metrics(self, _: web.Request) -> web.Response:
        lines = []
        for theirs, ours in COUNTERS.items():
            total = sum(figures[ours] for figures in self.served)
            lines.append(f'vllm:spec_decode_{theirs}_total{{engine="0",model_name="m"}} {total}.0\n')
        return web.Response(text="".join(lines))

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "owned_by": "vllm", "root": "m"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        record = self.answers[tuple(body["prompt"])]
        ids, with_ids = record["output_token_ids"], bool(body.get("return_token_ids"))
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
        figures = record["engine"]
        self.served.append(figures)
        stats = {theirs: figures[ours] for theirs, ours in FIGURES.items()}
        metrics = {"speculative_decoding": stats | {"acceptance_histogram": figures["accepted_histogram"]}}
        if not body.get("stream"):
            choice: dict[str, Any] = {"index": 0, "text": record["output"], "finish_reason": "length"}
            # vLLM writes the fields in any case, null where they were not asked for.
            choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"]} if with_ids else dict.fromkeys(IDS)
            return web.json_response(head | {"choices": [choice], "usage": usage, "metrics": metrics})
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await asyncio.sleep(self.first_s)
        for first in range(0, len(ids), 4):
            choice = {"index": 0, "text": record["output"] if first == 0 else "", "finish_reason": None}
            choice |= dict.fromkeys(IDS)
            if with_ids:
                choice["token_ids"] = ids[first : first + 4]
                choice["prompt_token_ids"] = body["prompt"] if first == 0 else None
            if first + 4 >= len(ids):
                choice["finish_reason"] = "length"
            await response.write(f"data: {json.dumps(head | {'choices': [choice]})}\n\n".encode())
            await asyncio.sleep(self.chunk_s)
        if body.get("stream_options", {}).get("include_usage"):
            last = head | {"choices": [], "usage": usage, "metrics": metrics}
            await response.write(f"data: {json.dumps(last)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


if __name__ == "__main__":
    engine = RecordedEngine(Path(sys.argv[2]), *map(float, sys.argv[3:]))
    app = web.Application(client_max_size=1 << 30)
    app.router.add_get("/version", engine.version)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_get("/metrics", engine.metrics)
    app.router.add_post("/v1/completions", engine.complete)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
