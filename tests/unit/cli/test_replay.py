"""`driftwatch replay` writes what was asked for whole or not at all, and never over what it reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from driftwatch.cli.replay import replay
from driftwatch.errors import DriftwatchError

SHORT: dict[str, object] = {"id": "short", "prompt_token_ids": [1, 2], "output_token_ids": [3]}
GOOD: dict[str, object] = {"id": "good", "prompt_token_ids": [1, 2, 1, 2], "output_token_ids": [1, 2, 1]}
NGRAM = "ngram:min=1,max=3"


def written(path: Path, *records: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def told(*arguments: str | Path) -> str:
    done = CliRunner().invoke(replay, [*map(str, arguments)])
    assert isinstance(done.exception, DriftwatchError), done.output
    return str(done.exception)


def test_the_records_are_never_written_over(tmp_path: Path) -> None:
    file = written(tmp_path / "in.jsonl", GOOD)
    before = file.read_text()
    os.symlink(file, tmp_path / "link.jsonl")
    for name in ("in.jsonl", "link.jsonl"):
        assert "the records are read from it" in told(file, "--draft", NGRAM, "--per-request", tmp_path / name)
    assert file.read_text() == before


@pytest.mark.parametrize("records", [[SHORT], [GOOD, {"id": "broken"}], []])
def test_what_was_there_stays_if_nothing_comes_of_it(tmp_path: Path, records: list[dict[str, object]]) -> None:
    file, out = written(tmp_path / "in.jsonl", *records), tmp_path / "out.jsonl"
    out.write_text("of an earlier run")
    told(file, "--draft", NGRAM, "--per-request", out)
    assert out.read_text() == "of an earlier run"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_lines_have_the_users_own_mode(tmp_path: Path) -> None:
    file, out = written(tmp_path / "in.jsonl", GOOD), tmp_path / "out.jsonl"
    before = os.umask(0o077)
    try:
        done = CliRunner().invoke(replay, [str(file), "--draft", NGRAM, "--per-request", str(out), "--json"])
    finally:
        os.umask(before)
    assert done.exit_code == 0, done.output
    assert out.stat().st_mode & 0o777 == 0o600
    assert json.loads(out.read_text())["id"] == "good"


def test_requests_that_came_to_nothing_are_skipped_not_refused(tmp_path: Path) -> None:
    empty: list[dict[str, object]] = [
        {"id": "e", "prompt_token_ids": [1], "output_token_ids": []},
        {"id": "p", "prompt_token_ids": [], "output_token_ids": [1, 2]},
    ]
    file = written(tmp_path / "in.jsonl", GOOD, *empty)
    done = CliRunner().invoke(replay, [str(file), "--draft", NGRAM, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["requests"], report["skipped"]) == (1, {"too_short": 2})
