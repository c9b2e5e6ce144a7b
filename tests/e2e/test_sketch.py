"""``driftwatch sketch`` as a user types it: from training data to which requests are off it, and what that is worth."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from driftwatch.shadow.tokenizer import Retokeniser
from tests.e2e.machine import CHAIN, DATA, TRACE
from tests.e2e.test_commands import refused, run

TARGET = DATA / "models" / "target"
EAGLE3 = DATA / "models" / "eagle3"
LENGTHS = (16, 32, 48, 64, 90)


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sources(tokenizer: Retokeniser) -> list[dict[str, Any]]:
    """Pieces of Python's own library, which is what the chain draft was trained on, as SpecForge takes them."""
    rows = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]:
        ids = tokenizer.encode(path.read_text(errors="replace")[:12_000])
        for i, start in enumerate(range(0, len(ids) - 160, 200)):
            length = LENGTHS[i % len(LENGTHS)]
            piece = ids[start : start + length + 64]
            rows.append({"input_ids": piece, "loss_mask": [0] * length + [1] * 64})
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training data, a sample of production, and the sketch of both."""
    folder = tmp_path_factory.mktemp("sketch")
    lines(folder / "train.jsonl", sources(Retokeniser(TARGET)))
    data: list[str | Path] = ["--data", "train.jsonl", "--production", TRACE, "--draft", CHAIN, "--target", TARGET]
    done = run("sketch", "build", *data, "--out", "chain.npz", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "said").write_text(done.stdout)
    return folder


def test_build_says_what_it_made(folder: Path) -> None:
    made, chance, off = (folder / "said").read_text().splitlines()
    assert made.startswith("chain.npz: 0.")
    assert "held out; draft 444cd2744eda" in made
    assert "(epsilon 0.05)" in chance
    assert "of 72 requests; at least " in off
    assert (folder / "chain.npz").stat().st_size < 2_000_000


def test_score_tells_prose_from_code_and_what_that_is_worth(folder: Path) -> None:
    replayed = run("replay", TRACE, "--draft", CHAIN, "--gamma", "3", "--per-request", "out.jsonl", cwd=folder)
    assert replayed.returncode == 0, replayed.stderr
    options = ["--sketch", "chain.npz", "--results", "out.jsonl"]
    done = run("sketch", "score", TRACE, *options, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["requests"] == report["off"]["requests"] == len(report["records"]) == 72
    for one in report["records"]:
        assert 0 < one["p"] <= 1
        assert one["split"] == ("off" if one["p"] <= report["sketch"]["epsilon"] else "on")
        assert 0 <= one["output_novelty"] <= 1
    off = [[r["split"] for r in report["records"] if r["id"][0] == domain].count("off") for domain in "AB"]
    assert off[1] > 18 > 2 * off[0]
    acceptance = report["acceptance"]
    assert [tenth["lower"] for tenth in acceptance["tenths"]] == [i / 10 for i in range(10)]
    assert sum(tenth["hit_rate"]["requests"] for tenth in acceptance["tenths"]) == 72
    assert acceptance["answer"] == "informative"
    assert 0 < acceptance["difference"]["lower"] < acceptance["difference"]["value"] < 0.4
    shown = run("sketch", "score", TRACE, *options, cwd=folder).stdout
    assert shown.count("\toutput novelty ") == 72
    assert "the sketch tells where the draft is accepted less" in shown


def test_what_is_wrong_is_one_line(folder: Path) -> None:
    (folder / "few.jsonl").write_text('{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}\n')
    line = refused("sketch", "build", "--data", "few.jsonl", "--draft", CHAIN, "--out", "new.npz", cwd=folder)
    assert "only 1 different prompts in the training data; a sketch needs 100" in line
    assert not (folder / "new.npz").exists()
