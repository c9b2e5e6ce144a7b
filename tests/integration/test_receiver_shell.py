"""The same in shell (``receiver.sh``): a CGI program of curl, openssl and jq takes what control really delivers."""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import sqlalchemy as sa
import yaml

from driftwatch.store.schema import Delivery
from tests.e2e.machine import until
from tests.serving import serving

from .retraining import asking

SCRIPT = Path(__file__).parent / "receiver.sh"
SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()


@contextmanager
def listening(folder: Path, secret: str) -> Iterator[tuple[str, list[int]]]:
    """A web server that runs the script for each request, as CGI has it; its URL, and the answers given."""
    answers: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            named = {f"HTTP_{key.upper().replace('-', '_')}": value for key, value in self.headers.items()}
            environment = {"PATH": os.environ["PATH"], "SECRET": secret, "FOLDER": str(folder)} | named
            done = subprocess.run(["sh", str(SCRIPT)], input=body, env=environment, capture_output=True)
            answers.append(int(done.stdout.split()[1]) if done.returncode == 0 else 500)
            self.send_response(answers[-1])
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with serving(server):
        yield f"http://127.0.0.1:{server.server_port}/", answers


def test_a_shell_script_can_verify_start_and_report(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    wrong_secret = SECRET[:-4] + "eHg="
    with listening(runs, SECRET) as (url, answers), listening(runs, wrong_secret) as (wrong, refusals):
        hooks = [{"name": name, "url": at, "secrets": [SECRET]} for name, at in (("r", url), ("w", wrong))]
        exports = {"export_dir": str(tmp_path / "exports")}
        with asking(tmp_path, retrain=exports, webhooks=hooks) as (machine, store, id):
            retrain = f"{machine.control}/v1/retrains/{id}"
            until(lambda: httpx.get(retrain).json()["state"] == "training")
            until(lambda: len(answers) == 1 and refusals)
            with store.write() as session:  # the answer got lost: the same again
                again = sa.update(Delivery).where(Delivery.endpoint == "r").values(state="pending", due_at=0)
                session.execute(again)
            until(lambda: len(answers) == 2)
    assert (set(answers), set(refusals)) == ({204}, {401})
    (run,) = runs.iterdir()
    assert len((run / "train.jsonl").read_text().splitlines()) > 10
    assert yaml.safe_load((run / "run.yaml").read_text())["data"]["prompts_path"] == f"{run}/train.jsonl"
