from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from driftwatch.cli.doctor import _engine
from driftwatch.settings import Settings


class Guarded(BaseHTTPRequestHandler):
    """An engine that wants a key."""

    def do_GET(self) -> None:
        known = self.headers.get("authorization") == "Bearer sesame"
        self.send_response(200 if known else 401)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_the_engine_is_asked_with_its_key(url: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sesame\n")
    for keyed in ({"token": "sesame"}, {"token_file": str(tmp_path / "key")}):
        assert _engine(Settings(engine={"url": url, **keyed})).level == "ok"


@pytest.mark.parametrize(
    ("keyed", "said"),
    [
        ({}, "answers 401: it wants an API key: set engine.token"),
        ({"token": "wrong"}, "answers 401: it wants another API key than that of engine.token"),
        ({"token_file": "/nowhere/key"}, "`engine.token_file`: /nowhere/key: No such file or directory"),
    ],
)
def test_a_missing_or_wrong_key_is_a_problem_that_says_so(url: str, keyed: dict[str, str], said: str) -> None:
    finding = _engine(Settings(engine={"url": url, **keyed}))
    assert finding.level == "problem"
    assert said in finding.text
    assert "wrong" not in finding.text
