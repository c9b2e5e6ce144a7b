"""``driftwatch retrain`` on a store: what it writes, what it refuses, and what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import sqlalchemy as sa
import yaml
from click.testing import CliRunner, Result
from fastapi.testclient import TestClient

from driftwatch.cli import commands
from driftwatch.control.app import create_app
from driftwatch.errors import DriftwatchError
from driftwatch.settings import Settings
from driftwatch.store.connection import Store
from driftwatch.store.schema import Cell, Replay
from tests.e2e.machine import until

from .retraining import CHAIN, send
from .test_control import judge

MODELS = CHAIN.parent
SEGMENT = ("--segment", "tenant=a")


@pytest.fixture
def config(tmp_path: Path, sqlite_store: Store) -> Path:
    """Settings of a store with forty judged requests."""
    model = {"name": "*", "target": str(MODELS / "target"), "drafts": [{"path": str(MODELS / "eagle3")}], "gamma": 3}
    values: dict[str, Any] = {
        "store": {"url": str(sqlite_store.url)},
        "models": [model],
        "detect": {"baseline": {"min_requests": 10_000}},
        "control": {"tick_s": 3600},
        "shadow": {"device": "cpu", "threads": 1},
    }
    settings = Settings(**values)
    with TestClient(create_app(sqlite_store, settings)) as client:
        send(client, range(40))
        judge(sqlite_store, settings, 0.8)
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def retrain(*arguments: str) -> Result:
    result = CliRunner().invoke(commands, ["retrain", *arguments])
    if result.exception is not None and not isinstance(result.exception, DriftwatchError | SystemExit):
        raise result.exception
    return result


def test_features_are_part_of_the_export_and_of_its_manifest(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = retrain("export", *SEGMENT, "--out", str(out), "--features", "--config", str(config))
    assert done.exit_code == 0, done.output
    manifest = json.loads((out / "manifest.json").read_text())
    rows = len((out / "train.jsonl").read_text().splitlines())
    files = list((out / "features" / "rows_0-2000").iterdir())
    assert manifest["features"]["rows"] == manifest["data"]["rows"] == rows == len(files) > 30
    assert manifest["features"]["bytes"] == sum(file.stat().st_size for file in files)
    assert (out.stat().st_mode & 0o077) == 0
    # The same of the rows alone, for a pipeline that has no store; and wherever fsspec reaches.
    place = f"memory://{tmp_path.name}/features"
    draft, target = str(MODELS / "eagle3"), str(MODELS / "target")
    given = ["features", "--data", str(out / "train.jsonl"), "--draft", draft, "--target", target, "--out", place]
    done = retrain(*given)
    assert done.exit_code == 0, done.output
    assert f"features of {rows} rows" in done.output
    memory, path = fsspec.core.url_to_fs(place)
    told = json.loads(memory.cat_file(f"{path}/manifest.json"))
    assert told == manifest["features"]
    assert len(memory.find(f"{path}/rows_0-2000")) == rows
    again = retrain(*given)
    assert "exists; give a new folder" in str(again.exception)


def test_without_features_the_manifest_says_that_there_are_none(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert retrain("export", *SEGMENT, "--out", str(out), "--config", str(config)).exit_code == 0
    assert json.loads((out / "manifest.json").read_text())["features"] is None
    assert sorted(file.name for file in out.iterdir()) == ["eval.jsonl", "manifest.json", "train.jsonl"]


def test_a_segment_is_exported_on_and_off_its_training_distribution(
    config: Path, tmp_path: Path, sqlite_store: Store
) -> None:
    with sqlite_store.write() as session:
        session.execute(sa.update(Replay).where(Replay.id % 2 == 0).values(split="off"))
        one = session.scalars(sa.select(Cell)).one()
        names = ("deployment_id", "draft", "segment", "fingerprint", "gamma", "state", "sums")
        other = {name: getattr(one, name) for name in names}
        session.add(Cell(**other, split="off", updated_at=one.updated_at + 1))
    out = tmp_path / "out"
    assert retrain("export", *SEGMENT, "--out", str(out), "--config", str(config)).exit_code == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["data"]["pools"], manifest["split"]) == ({"event": 40}, None)


@pytest.mark.parametrize("form", ["{}", "file://{}", "memory:/{}"])
def test_what_is_there_is_never_overwritten(config: Path, tmp_path: Path, form: str) -> None:
    there = form.format(tmp_path / "there")
    files, path = fsspec.core.url_to_fs(there)
    files.makedirs(path)
    files.pipe_file(f"{path}/mine", b"1")
    refused = retrain("export", *SEGMENT, "--out", there, "--config", str(config))
    assert str(refused.exception) == f"--out {there} exists; give a new folder"
    assert files.cat_file(f"{path}/mine") == b"1"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.pop("target"), "--features needs `models[].target`"),
        (lambda model: model["drafts"][0].update(path=str(CHAIN)), "no features for a draft of kind chain"),
        (lambda model: model.update(target="/nowhere"), "/nowhere"),
    ],
)
def test_features_that_cannot_be_had_leave_nothing(
    config: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    values = yaml.safe_load(config.read_text())
    change(values["models"][0])
    config.write_text(yaml.safe_dump(values))
    refused = retrain("export", *SEGMENT, "--out", str(tmp_path / "out"), "--features", "--config", str(config))
    assert said in str(refused.exception)
    assert "\n" not in str(refused.exception)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


SLOW = """
import time
def redact(row):
    open("seen", "a").write("x")
    time.sleep(0.05)
    return row
"""


BUCKET = """
import fsspec
from fsspec.implementations.local import LocalFileSystem
class Bucket(LocalFileSystem):
    protocol = "bucket"
    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("bucket://"))
fsspec.register_implementation("bucket", Bucket)
"""
"""An object store, as far as can be told: it renames no folder."""


@pytest.mark.parametrize("place", ["folder", "remote"])
def test_a_kill_in_the_middle_leaves_nothing_that_looks_whole(config: Path, tmp_path: Path, place: str) -> None:
    """SIGKILL while rows are written; the next run for the same place takes what was left of them away."""
    (tmp_path / "slow.py").write_text(SLOW)
    values = yaml.safe_load(config.read_text()) | {"retrain": {"data": {"redact": "slow:redact"}}}
    config.write_text(yaml.safe_dump(values))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "sitecustomize.py").write_text(BUCKET)
    out = str(tmp_path / "out") if place == "folder" else f"bucket://{tmp_path / 'out'}"
    command = [sys.executable, "-m", "driftwatch", "retrain", "export", *SEGMENT, "--out", out, "--config", str(config)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
    seen = tmp_path / "seen"
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    until(lambda: seen.exists() and len(seen.read_text()) > 5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out" / "manifest.json").exists()
    left = [*scratch.glob("driftwatch-*"), *tmp_path.glob(".out-*")]
    assert len(left) == 1
    assert (left[0].stat().st_mode & 0o077) == 0  # people's words: for their owner's eyes alone
    (tmp_path / "slow.py").write_text(SLOW.replace("0.05", "0"))
    begun = time.time()
    assert subprocess.run(command, cwd=tmp_path, env=environment).returncode == 0
    assert (tmp_path / "out" / "manifest.json").stat().st_mtime >= begun - 1
    assert not [*scratch.glob("driftwatch-*"), *tmp_path.glob(".out-*")]
