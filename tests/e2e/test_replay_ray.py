"""``driftwatch replay --ray`` on a real Ray of this machine: the same result to the last count, or one clear line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from driftwatch.cli import commands
from driftwatch.errors import DriftwatchError
from tests.e2e.machine import DATA, TRACE

TREE = f"{DATA / 'models' / 'eagle3'}:steps=3,topk=2,tokens=4"
TARGET = str(DATA / "models" / "target")


def replay(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "driftwatch", "replay", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DRIFTWATCH_SHADOW__DEVICE": "cpu"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def history(path: Path, times: int) -> None:
    """The recorded requests again and again, of two tenants and shorter from time to time: more than two chunks."""
    records = [json.loads(line) for line in TRACE.read_text().splitlines()]
    with path.open("w") as file:
        for turn in range(times):
            for record in records:
                output = record["output_token_ids"][: 64 - turn]
                labels = {"tenant": "ab"[turn % 2]}
                file.write(json.dumps(record | {"output_token_ids": output, "labels": labels}) + "\n")


def test_ray_gives_the_same_to_the_last_count(tmp_path: Path) -> None:
    history(tmp_path / "records.jsonl", 30)
    common = ["records.jsonl", "--draft", "ngram:min=1,max=3", "--by", "tenant", "--json", "--per-request"]
    alone = replay(tmp_path, *common, "alone.jsonl")
    shared = replay(tmp_path, *common, "shared.jsonl", "--ray")
    assert (alone.returncode, shared.returncode) == (0, 0), shared.stderr
    report = json.loads(alone.stdout)
    assert report["requests"] > 2 * 1024
    assert json.loads(shared.stdout) == report
    assert (tmp_path / "shared.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()
    assert (tmp_path / "alone.jsonl").read_bytes().count(b"\n") == report["requests"]


def test_actors_open_target_and_head_themselves_and_count_what_trees_cost(tmp_path: Path) -> None:
    common = [str(TRACE), "--draft", TREE, "--target", TARGET, "--json"]
    alone = replay(tmp_path, *common)
    shared = replay(tmp_path, *common, "--ray")
    assert (alone.returncode, shared.returncode) == (0, 0), shared.stderr
    report = json.loads(alone.stdout)
    assert report["cost"]["trees"] > 0
    assert json.loads(shared.stdout) == report


def test_a_bad_record_is_one_line_as_without_ray(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(TRACE.read_text().splitlines()[0] + "\n{}\n")
    shared = replay(tmp_path, "bad.jsonl", "--draft", "ngram:min=1,max=3", "--per-request", "x.jsonl", "--ray")
    assert shared.returncode == 2
    (line,) = [line for line in shared.stderr.splitlines() if line.startswith("driftwatch")]
    assert "bad.jsonl:2: " in line
    assert "Traceback" not in shared.stderr
    assert not (tmp_path / "x.jsonl").exists()


@pytest.mark.parametrize(
    ("files", "address", "said"),
    [
        (["a.jsonl"], ["--ray", "a.jsonl"], "that is a file; write --ray behind FILES"),
        (["a.jsonl"], ["--ray=127.0.0.1:1"], "no Ray at 127.0.0.1:1: "),
        (["a.jsonl"], ["--ray=nowhere"], "--ray nowhere: not an address; write HOST:PORT"),
        (["/dev/null"], ["--ray"], "/dev/null is no file; name files of records"),
    ],
)
def test_wrong_use_is_one_line(
    files: list[str], address: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(TRACE.read_text())
    with pytest.raises(DriftwatchError, match=re.escape(said)) as caught:
        commands.main(["replay", *files, "--draft", "ngram:min=1,max=3", *address], standalone_mode=False)
    assert "\n" not in str(caught.value)


def test_without_its_library_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text(TRACE.read_text())
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "driftwatch.shadow.rays", raising=False)
    arguments = ["replay", str(tmp_path / "a.jsonl"), "--draft", "ngram:min=1,max=3", "--ray"]
    said = "--ray needs ray, which is not installed: pip install 'driftwatch-sidecar[ray]'"
    with pytest.raises(DriftwatchError, match=re.escape(said)):
        commands.main(arguments, standalone_mode=False)
