"""The training Job of the reference pipeline: valid, confined, and what ``submit.py`` creates over an API."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from driftwatch.retrain.specforge import Run
from tests.serving import serving

PIPELINE = Path(__file__).parents[3] / "deploy" / "retrain-pipeline"
DATA = Path(__file__).parents[2] / "data"
VERSIONS = ("1.29", "1.33", "1.37")
NAMES = {
    "IMAGE": "registry.example/specforge:0.2.0",
    "CLAIM": "candidates",
    "CAPTURE_SERVER": "sglang",
    "MOONCAKE_SERVER": "mooncake",
}
RUN = "0123456789abcdef"


def job() -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("submit", PIPELINE / "submit.py")
    assert spec is not None
    assert spec.loader is not None
    submit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(submit)
    made: dict[str, Any] = submit.manifest(RUN, NAMES)
    return made


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_are_valid(version: str) -> None:
    kubernetes_validate.validate(job(), version, strict=True)
    for one in yaml.safe_load_all((PIPELINE / "rbac.yaml").read_text()):
        kubernetes_validate.validate(one, version, strict=True)


def test_the_job_is_confined_and_works_in_the_folder_of_its_request() -> None:
    made = job()
    pod = made["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (made["metadata"]["name"], container["workingDir"]) == (RUN, f"/data/candidates/{RUN}")
    assert (container["image"], container["command"]) == (NAMES["IMAGE"], ["sh", "train.sh"])
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


class Cluster(ThreadingHTTPServer):
    """The two calls of the API that are used: a Job runs through the given states, one a look."""

    def __init__(self, states: list[dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), Calls)
        self.states, self.created, self.calls = states, {}, list[tuple[str, str, str | None]]()

    created: dict[str, Any]


class Calls(BaseHTTPRequestHandler):
    server: Cluster

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        kubernetes_validate.validate(body, VERSIONS[-1], strict=True)
        known = body["metadata"]["name"] in self.server.created
        self.server.created.setdefault(body["metadata"]["name"], body)
        self.answer(409 if known else 201, body)

    def do_GET(self) -> None:
        job = self.server.created[self.path.rsplit("/", 1)[1]]
        self.answer(200, job | {"status": self.server.states.pop(0)})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        self.server.calls.append((self.command, self.path, self.headers["authorization"]))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def cluster(*states: dict[str, Any]) -> Iterator[Cluster]:
    server = Cluster(list(states))
    with serving(server):
        yield server


def submit(tmp_path: Path, server: Cluster) -> subprocess.CompletedProcess[str]:
    folder, account = tmp_path / RUN, tmp_path / "account"
    folder.mkdir(exist_ok=True)
    account.mkdir(exist_ok=True)
    (account / "namespace").write_text("ml")
    (account / "token").write_text("secret\n")
    environment = NAMES | {"API": f"http://127.0.0.1:{server.server_port}", "ACCOUNT": str(account), "POLL_S": "0.01"}
    command = [sys.executable, str(PIPELINE / "submit.py")]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=60)


def ended(how: str) -> dict[str, Any]:
    return {"conditions": [{"type": "SuccessCriteriaMet", "status": "True"}, {"type": how, "status": "True"}]}


def test_a_job_is_created_and_waited_for(tmp_path: Path) -> None:
    jobs = "/apis/batch/v1/namespaces/ml/jobs"
    with cluster({}, {"active": 1}, ended("Complete")) as server:
        done = submit(tmp_path, server)
    assert done.returncode == 0, done.stderr
    assert server.calls == [("POST", jobs, "Bearer secret")] + [("GET", f"{jobs}/{RUN}", "Bearer secret")] * 3
    assert (tmp_path / RUN / "train.sh").read_bytes() == (PIPELINE / "train.sh").read_bytes()


def test_one_that_fails_is_a_failed_command_and_one_that_runs_already_is_no_second(tmp_path: Path) -> None:
    with cluster(ended("Failed"), ended("Complete")) as server:
        assert submit(tmp_path, server).returncode == 1
        assert submit(tmp_path, server).returncode == 0
    assert list(server.created) == [RUN]


SPECFORGE = """#!/bin/sh
echo "$@" >>calls
[ "$1" = export ] && mkdir draft || true
"""


def test_the_script_runs_the_lines_of_its_request_in_order(tmp_path: Path) -> None:
    """SpecForge itself needs GPUs: a program of its name writes down how it is called."""
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "specforge").write_text(SPECFORGE)
    (bin / "specforge").chmod(0o755)
    folder = tmp_path / RUN
    folder.mkdir()
    shutil.copy(PIPELINE / "train.sh", folder)
    lines = {
        "mapping": "touch OUTPUT_DIR/vocab_mapping.pt",
        "plan": "specforge train -c OUTPUT_DIR/run.yaml --plan",
        "train": "specforge train -c OUTPUT_DIR/run.yaml",
        "export": "specforge export --output-dir OUTPUT_DIR/draft",
    }
    (folder / "request.json").write_text(json.dumps({"data": {"specforge": {"commands": lines}}}))
    (folder / "run.yaml").write_text("servers: [http://CAPTURE_SERVER:30000, MOONCAKE_SERVER:50051]\n")
    environment = os.environ | NAMES | {"PATH": f"{bin}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "train.sh"], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "calls").read_text().splitlines() == [
        f"train -c {folder}/run.yaml --plan",
        f"train -c {folder}/run.yaml",
        f"export --output-dir {folder}/draft",
    ]
    assert yaml.safe_load((folder / "run.yaml").read_text()) == {"servers": ["http://sglang:30000", "mooncake:50051"]}
    assert (folder / "vocab_mapping.pt").exists()


def test_without_a_capture_server_features_of_the_rows_are_written_first(tmp_path: Path) -> None:
    """By driftwatch's own command, as the request tells it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "specforge").write_text(SPECFORGE)
    (tmp_path / "bin" / "specforge").chmod(0o755)
    folder = tmp_path / RUN
    folder.mkdir()
    shutil.copy(PIPELINE / "train.sh", folder)
    run = Run("r", str(DATA / "models" / "target"), str(DATA / "models" / "eagle3"), "eagle3")
    (folder / "request.json").write_text(json.dumps({"data": {"specforge": {"commands": run.commands(None)}}}))
    row = {"input_ids": list(range(1, 30)), "loss_mask": [0] * 20 + [1] * 9}
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    programs = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": programs, "CAPTURE_SERVER": "", "OMP_NUM_THREADS": "1"}
    for _ in range(2):  # a Job tries once more
        shutil.rmtree(folder / "draft", ignore_errors=True)
        done = subprocess.run(["sh", "train.sh"], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert [file.name for file in (folder / "features").rglob("*.ckpt")] == ["data_0.ckpt"]
    assert json.loads((folder / "features" / "manifest.json").read_text())["rows"] == 1
    assert (folder / "vocab_mapping.pt").exists()
    calls = (folder / "calls").read_text().splitlines()
    assert [line.split()[0] for line in calls] == ["train", "export"] * 2
    assert calls[0] == f"train -c {folder}/run.offline.yaml"


def test_a_step_that_fails_ends_the_script(tmp_path: Path) -> None:
    shutil.copy(PIPELINE / "train.sh", tmp_path)
    lines = {"plan": "false", "train": "touch trained"}
    (tmp_path / "request.json").write_text(json.dumps({"data": {"specforge": {"commands": lines}}}))
    (tmp_path / "run.yaml").write_text("a: b\n")
    assert subprocess.run(["sh", "train.sh"], cwd=tmp_path, env=os.environ | NAMES).returncode != 0
    assert not (tmp_path / "trained").exists()
