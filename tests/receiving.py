"""A webhook's endpoint beside a test: a real HTTP server that answers as it is told and keeps what it got."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.serving import serving


class Receiver:
    """Answers in turn, then 204 to everything."""

    def __init__(self, *answers: tuple[int, dict[str, str]]) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        """Headers in small letters, and bodies."""
        answers_left = list(answers)
        received = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                received.append(({key.lower(): value for key, value in self.headers.items()}, body))
                status, headers = answers_left.pop(0) if answers_left else (204, {})
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"

    @property
    def ids(self) -> list[str]:
        """Of the events that came, as their header says."""
        return [headers["webhook-id"] for headers, _ in self.requests]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.requests]


@contextmanager
def receiving(*answers: tuple[int, dict[str, str]]) -> Iterator[Receiver]:
    receiver = Receiver(*answers)
    with serving(receiver.server):
        yield receiver
