"""Small servers that run the real target and answer with its hidden states in an engine's documented form."""

from __future__ import annotations

import fcntl
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from driftwatch.shadow.target import Target
from tests.serving import serving

Answer = tuple[int, bytes]


class SmallEngine:
    """One engine: what it is asked, and how it answers. Attributes may be changed while it runs."""

    def __init__(self, target: Target, layers: tuple[int, ...]) -> None:
        self.target, self.layers = target, layers
        self.asked: list[dict[str, Any]] = []
        self.longest: int | None = None
        """Prompts of more tokens are refused, as engines do beyond their context."""

    def states(self, ids: list[int]) -> torch.Tensor:
        """[tokens, layers, hidden] by the library's own ``output_hidden_states``."""
        model = self.target.model().model
        with torch.inference_mode():
            found = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        return torch.stack([found[layer][0] for layer in self.layers], dim=1)

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        raise NotImplementedError

    @contextmanager
    def running(self, port: int = 0) -> Iterator[str]:
        """Its base URL, while it runs."""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                engine.asked.append(body)
                status, content = engine.answer(self.path, body)
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        with serving(server):
            yield f"http://127.0.0.1:{server.server_port}"


class SmallSglang(SmallEngine):
    """``/generate``: rows of the layers one after the other, by prefill chunk, then one a decoded token."""

    chunk = 50
    cached = 0
    """Leading rows that a prefix cache keeps back."""

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        if path != "/generate":
            return 404, b"{}"
        ids = body["input_ids"]
        if self.longest is not None and len(ids) > self.longest:
            return 400, b'{"error": {"message": "the input is longer than the context"}}'
        rows = self.states(ids).flatten(1)[self.cached :].tolist()
        chunks = [rows[start : start + self.chunk] for start in range(0, len(rows), self.chunk)]
        meta = {"id": "x", "prompt_tokens": len(ids), "completion_tokens": 1, "hidden_states": chunks}
        return 200, json.dumps({"text": "", "output_ids": [0], "meta_info": meta}).encode()


class SmallVllm(SmallEngine):
    """``/v1/completions`` with the ExampleHiddenStatesConnector: a file in the shared folder, locked until written."""

    def __init__(self, target: Target, layers: tuple[int, ...], folder: Path) -> None:
        super().__init__(target, layers)
        self.folder = folder
        self.write: Callable[[Path, dict[str, torch.Tensor]], None] = lambda path, tensors: save_file(tensors, path)

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        if path != "/v1/completions":
            return 404, b"{}"
        ids = body["prompt"]
        if self.longest is not None and len(ids) > self.longest:
            return 400, b'{"error": {"message": "the prompt is longer than the context"}}'
        file = self.folder / f"cmpl-{uuid.uuid4().hex}-0.safetensors"
        lock = file.with_name(f"{file.name}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish() -> None:
            with lock:
                self.write(file, {"hidden_states": self.states(ids).contiguous(), "token_ids": torch.tensor(ids)})

        threading.Thread(target=finish).start()
        params = {"hidden_states_path": f"/where/the/engine/sees/it/{file.name}"}
        answer = {"object": "text_completion", "choices": [{"index": 0, "text": ""}], "kv_transfer_params": params}
        return 200, json.dumps(answer).encode()
