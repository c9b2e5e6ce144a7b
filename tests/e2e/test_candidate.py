"""``driftwatch candidate compare`` as a process: what it prints and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.machine import CHAIN, TRACE

NGRAM = "ngram:min=1,max=3"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "driftwatch", "candidate", "compare", *arguments]
    more = {"OMP_NUM_THREADS": "1", "COLUMNS": "80"} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | more)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded requests ten times over: in tokens alike, but units of their own."""
    rows = [json.loads(line) for line in TRACE.read_text().splitlines()]
    path = tmp_path_factory.mktemp("many") / "records.jsonl"
    copies = [row | {"id": f"{copy}-{row['id']}"} for copy in range(10) for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in copies))
    return path


def test_a_better_draft_is_0_and_a_worse_one_1(many: Path) -> None:
    """The trained chain is better than counting on its own domain, and worse on the other: over all it is better."""
    better = run(str(many), "--incumbent", NGRAM, "--candidate", str(CHAIN), "--json")
    assert better.returncode == 0, better.stdout + better.stderr
    found: dict[str, Any] = json.loads(better.stdout)
    assert found["verdict"] == "promote"
    assert found["overall"]["requests"] == 720
    assert found["overall"]["lower"] > 0.01
    worse = run(str(many), "--incumbent", str(CHAIN), "--candidate", NGRAM)
    assert worse.returncode == 1
    assert "reject: " in worse.stdout


def test_cells_are_looked_at_one_by_one(many: Path) -> None:
    split = run(str(many), "--incumbent", NGRAM, "--candidate", str(CHAIN), "--by", "domain", "--json")
    found = json.loads(split.stdout)
    assert {row["name"]: row["finding"] for row in found["table"]}["domain=A"] == "kept"
    assert [row["name"] for row in found["table"]] == ["domain=A", "domain=B"]
    assert split.returncode == (0 if found["verdict"] == "promote" else 1)


def test_few_requests_are_not_enough_data() -> None:
    few = run(str(TRACE), "--incumbent", str(CHAIN), "--candidate", str(CHAIN))
    assert few.returncode == 1
    assert "more data: " in few.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([str(TRACE), "--incumbent", "/nowhere", "--candidate", str(CHAIN)], "draft /nowhere: no such folder"),
        (["/nowhere.jsonl", "--incumbent", str(CHAIN), "--candidate", str(CHAIN)], "/nowhere.jsonl: "),
    ],
)
def test_wrong_use_is_one_line_and_2(arguments: list[str], said: str) -> None:
    wrong = run(*arguments)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith(f"driftwatch: {said}")
    assert len(wrong.stderr.splitlines()) == 1
