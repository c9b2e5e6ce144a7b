"""The commands as a user types them: contracts of their output, exit codes, and one line for what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from driftwatch.records import read_records
from tests.e2e.machine import CHAIN, TRACE, Machine


def run(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "driftwatch", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=os.environ | environment)


def refused(*arguments: str | Path, cwd: Path, **environment: str) -> str:
    """The one line on stderr of a command that exits with 2."""
    done = run(*arguments, cwd=cwd, **environment)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("replay")
    options = ["--gamma", "5", "--by", "domain", "--per-request", "out.jsonl", "--json"]
    done = run("replay", TRACE, "--draft", CHAIN, *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_replay_prints_the_contract(replayed: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    report, lines = replayed
    assert {"requests", "output_tokens", "rule", "draft", "gamma", "by", "skipped"} <= set(report)
    assert (report["requests"], report["output_tokens"], report["rule"]) == (72, 72 * 64, "argmax")
    assert list(report["gamma"]) == ["1", "2", "3", "4", "5"]
    keys = {"steps", "windows", "drafted", "accepted", "rejected", "acceptance_rate", "hit_rate", "acceptance_length"}
    for gamma, figures in report["gamma"].items():
        assert keys <= set(figures)
        assert len(figures["accepted_per_depth"]) == int(gamma)
        assert sum(figures["accepted_per_depth"]) == figures["accepted"]
        assert figures["accepted"] == sum(line["gamma"][gamma]["accepted"] for line in lines)
    assert set(report["by"]["domain"]) == {"A", "B"}
    parts = [part["gamma"]["3"]["windows"] for part in report["by"]["domain"].values()]
    assert sum(parts) == report["gamma"]["3"]["windows"]
    assert report["skipped"] == {}


def test_per_request_lines_hold_the_engines_windows(replayed: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    _, lines = replayed
    equal = total = 0
    for line, record in zip(lines, read_records([TRACE]), strict=True):
        assert (line["id"], line["labels"]) == (record.id, record.labels)
        assert record.engine is not None
        assert record.engine.accepted_per_window is not None
        ours = line["gamma"]["3"]["accepted_per_window"]
        assert sum(ours) == line["gamma"]["3"]["accepted"]
        equal += ours[:-1] == record.engine.accepted_per_window[:-1]
        total += 1
    assert equal / total > 0.6, "the others part at a near-tie of the draft's logits"


def test_replay_for_people(tmp_path: Path) -> None:
    done = run("replay", TRACE, "--draft", CHAIN, "--gamma", "3", cwd=tmp_path)
    assert done.returncode == 0
    assert "72 requests, 4608 output tokens" in done.stdout
    assert "0.640" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "none.jsonl", "--draft", CHAIN], "none.jsonl: No such file or directory"),
        (["replay", "bad.jsonl", "--draft", CHAIN], "bad.jsonl:2: not a JSON object"),
        (["replay", TRACE, "--draft", "nowhere"], "draft nowhere"),
        (["replay", "text.jsonl", "--draft", CHAIN], "no request could be replayed: no_tokenizer (1)"),
        (["replay", "far.jsonl", "--draft", CHAIN], "no request could be replayed: outside_vocabulary (1)"),
        (["replay", TRACE, "--draft", CHAIN, "--per-request", "no/such/out.jsonl"], "--per-request no/such/out.jsonl"),
        (["serve", "--config", "bad.yaml"], "unknown key `engine.ulr`, did you mean `url`"),
        (["db", "check", "--config", "none.yaml"], "none.yaml: No such file"),
        (["ingest", TRACE], "is it running?"),
        (["retrain", "export", "--segment", "x", "--out", "o"], "run `driftwatch db upgrade`"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path: Path, arguments: list[str | Path], message: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"id": "a", "prompt_token_ids": [1], "output_token_ids": [1, 2]}\nnonsense\n')
    (tmp_path / "bad.yaml").write_text("engine: {ulr: x}\n")
    (tmp_path / "text.jsonl").write_text('{"id": "a", "prompt": "p", "output": "o"}\n')
    (tmp_path / "far.jsonl").write_text('{"id": "a", "prompt_token_ids": [1], "output_token_ids": [1, 99999]}\n')
    environment = {"DRIFTWATCH_TAP__CONTROL_URL": "http://127.0.0.1:9"}
    assert message in refused(*arguments, cwd=tmp_path, **environment)


def test_a_failed_replay_leaves_no_half_written_file(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(TRACE.read_text() + "nonsense\n")
    refused("replay", "bad.jsonl", "--draft", CHAIN, "--per-request", "out.jsonl", cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_doctor_says_what_is_wrong_and_exits_1(tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    drafts = f"[{{name: '*', tokenizer: {CHAIN}, drafts: [{{name: a, path: {CHAIN}}}, {{name: b, path: {tmp_path}}}]}}]"
    config.write_text(f"engine: {{url: 'http://127.0.0.1:9'}}\nmodels: {drafts}\n")
    done = run("doctor", "--config", config, cwd=tmp_path)
    assert done.returncode == 1
    assert "problem  engine: http://127.0.0.1:9" in done.stdout
    assert "warning  store: sqlite:///driftwatch.db is empty" in done.stdout
    assert f"ok       draft {CHAIN}: chain draft, 513,312 parameters" in done.stdout
    assert f"problem  draft {tmp_path}" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_doctor_is_content_with_a_sound_setup(machine: Machine) -> None:
    machine.start_engine()
    assert run("db", "upgrade", "--config", machine.config, cwd=machine.folder).returncode == 0
    done = run("doctor", "--config", machine.config, cwd=machine.folder)
    assert done.returncode == 0, done.stdout
    assert "problem" not in done.stdout


def test_doctor_compares_vocabularies(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(CHAIN, other)
    path = other / "tokenizer.json"
    path.chmod(0o644)
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))
    done = run("doctor", "--draft", CHAIN, "--target", other, cwd=tmp_path)
    assert done.returncode == 1
    assert "its tokenizer is another one: 2 tokens differ" in done.stdout
    path.write_text("{}")
    done = run("doctor", "--draft", CHAIN, "--target", other, cwd=tmp_path)
    assert done.returncode == 1
    assert "problem" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_ingest_replays_history_through_control(machine: Machine) -> None:
    machine.start_control()
    first = run("ingest", TRACE, "--config", machine.config, cwd=machine.folder)
    again = run("ingest", TRACE, "--config", machine.config, cwd=machine.folder)
    assert (first.stdout.strip(), again.stdout.strip()) == ("stored 72, duplicates 0", "stored 0, duplicates 72")


def test_metrics_pass_promtool(machine: Machine) -> None:
    machine.start_engine()
    machine.start_control()
    machine.start_tap()
    run("ingest", TRACE, "--config", machine.config, cwd=machine.folder)
    for url in (machine.control, machine.admin):
        text = httpx.get(f"{url}/metrics").text
        checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
        assert (checked.returncode, checked.stderr) == (0, ""), checked.stdout


def test_db_check_says_what_to_do(tmp_path: Path) -> None:
    done = run("db", "check", cwd=tmp_path)
    assert done.returncode == 1
    assert "run `driftwatch db upgrade`" in done.stdout
