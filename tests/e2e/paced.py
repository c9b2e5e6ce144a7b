"""An engine with a clock: run as a process of its own, `python paced.py PORT TRACE plain|speculative`.

Each prompt of the trace is answered as a real vLLM answered it, in its wire format, a stream of one chunk a step: one
token every 4 ms, or, speculating, one window every 6 ms with what that engine accepted in it and one token more.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

PLAIN_S, WINDOW_S = 0.004, 0.006


def steps(record: dict[str, Any], speculative: bool) -> Iterator[int]:
    """Tokens of each step; the first comes from prefill."""
    left = len(record["output_token_ids"]) - 1
    yield 1
    for accepted in record["engine"]["accepted_per_window"] if speculative else [0] * left:
        if left > 0:
            yield min(1 + accepted, left)
            left -= 1 + accepted


class PacedEngine:
    def __init__(self, trace: Path, speculative: bool) -> None:
        records = [json.loads(line) for line in trace.read_text().splitlines()]
        self.answers = {tuple(record["prompt_token_ids"]): record for record in records}
        self.speculative = speculative

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        record = self.answers[tuple(body["prompt"])]
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for count in steps(record, self.speculative):
            await asyncio.sleep(WINDOW_S if self.speculative else PLAIN_S)
            choice = {"index": 0, "text": "x" * count, "finish_reason": None}
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(record["output_token_ids"])}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        return response


if __name__ == "__main__":
    engine = PacedEngine(Path(sys.argv[2]), sys.argv[3] == "speculative")
    app = web.Application(client_max_size=1 << 30)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_post("/v1/completions", engine.complete)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
