from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from driftwatch.cli.doctor import doctor
from driftwatch.cli.sketch import sketch
from driftwatch.drift.sketch import file
from driftwatch.drift.sketch.build import Row, build
from driftwatch.errors import DriftwatchError
from driftwatch.shadow.draft import hash_weights
from tests.conftest import DATA

TARGET, CHAIN, EAGLE3 = (DATA / "models" / name for name in ("target", "chain", "eagle3"))
TRACE = DATA / "traces" / "draft3.T0.jsonl"


def invoke(*arguments: str | Path) -> str:
    done = CliRunner().invoke(sketch, [str(argument) for argument in arguments])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def refused(*arguments: str | Path) -> str:
    with pytest.raises(DriftwatchError) as error:
        invoke(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def made(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 2048, rng.integers(5, 40)) for _ in range(130)]
    embedding = rng.normal(size=(2048, 16)).astype(np.float32)
    path = tmp_path / "made.npz"
    file.write(path, build([Row(ids, ids) for ids in prompts], embedding, draft="ab" * 32))
    return path


def test_text_needs_the_tokenizer(made: Path, tmp_path: Path) -> None:
    text = {"prompt": "import os", "output": "    pass"}
    asked = lines(tmp_path / "text.jsonl", {"id": "a"} | text, {"id": "b"} | text)
    assert refused("score", asked, "--sketch", made) == "no request could be scored: no_tokenizer (2)"
    both = lines(
        tmp_path / "both.jsonl", {"id": "a"} | text, {"id": "c", "prompt_token_ids": [1], "output_token_ids": [2]}
    )
    assert "skipped: 1 (no_tokenizer)" in invoke("score", both, "--sketch", made)
    report = json.loads(invoke("score", both, "--sketch", made, "--target", TARGET, "--json"))
    assert [one["id"] for one in report["records"]] == ["a", "c"]
    assert report["skipped"] == {}


def test_scoring_token_ids_needs_no_torch(made: Path) -> None:
    blocked = "import sys; sys.modules.update(torch=None, transformers=None); from driftwatch.cli import main; main()"
    arguments = ["sketch", "score", str(TRACE), "--sketch", str(made)]
    done = subprocess.run([sys.executable, "-c", blocked, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\toutput novelty ") == 72
    build = ["sketch", "build", "--data", str(TRACE), "--draft", str(CHAIN), "--out", str(made)]
    done = subprocess.run([sys.executable, "-c", blocked, *build], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'driftwatch-sidecar[shadow]'" in done.stderr


def test_a_build_that_cannot_be_says_why(tmp_path: Path) -> None:
    few = lines(tmp_path / "few.jsonl", {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]})
    empty = lines(tmp_path / "empty.jsonl")
    out = tmp_path / "new.npz"

    def why(data: Path, draft: Path | str, *more: str | Path) -> str:
        return refused("build", "--data", data, "--draft", draft, "--out", out, *more)

    assert "only 1 different prompts in the training data; a sketch needs 100" in why(few, CHAIN)
    assert "only 0 different prompts" in why(empty, CHAIN)
    assert "none.jsonl: No such file" in why(tmp_path / "none.jsonl", CHAIN)
    assert "was trained on nothing" in why(few, "ngram:min=1,max=3")
    assert "give --target" in why(few, EAGLE3)
    assert "no such folder" in why(few, tmp_path / "nowhere")
    assert not out.exists()


def test_a_build_of_an_eagle3_head_reads_the_targets_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = [{"input_ids": rng.integers(0, 2048, 30).tolist(), "loss_mask": [0] * 20 + [1] * 10} for _ in range(120)]
    data, out = lines(tmp_path / "train.jsonl", *rows), tmp_path / "head.npz"
    said = invoke("build", "--data", data, "--draft", EAGLE3, "--target", TARGET, "--out", out, "--epsilon", "0.2")
    assert "from 120 prompts, 30 of them held out" in said
    assert file.read(out).epsilon == 0.2
    missing = tmp_path / "no" / "where.npz"
    line = refused("build", "--data", data, "--draft", EAGLE3, "--target", TARGET, "--out", missing)
    assert "No such file" in line


def test_scores_that_cannot_be_say_why(made: Path, tmp_path: Path) -> None:
    assert "not a sketch" in refused("score", TRACE, "--sketch", TRACE)
    other = lines(tmp_path / "other.jsonl", {"id": "x", "accepted": 1, "rejected": 1})
    assert "no line has the id of a record" in refused("score", TRACE, "--sketch", made, "--results", other)
    empty = lines(tmp_path / "empty.jsonl")
    assert "the files hold no records" in refused("score", empty, "--sketch", made)


def test_few_results_are_no_answer(made: Path, tmp_path: Path) -> None:
    one = lines(tmp_path / "one.jsonl", {"id": "A00", "accepted": 1, "rejected": 1})
    assert "not enough data: two groups of tenths" in invoke("score", TRACE, "--sketch", made, "--results", one)
    report = json.loads(invoke("score", TRACE, "--sketch", made, "--results", one, "--json"))
    assert (report["acceptance"]["answer"], report["acceptance"]["difference"]) == ("not enough data", None)


def test_doctor_says_whether_a_sketch_is_its_drafts_own(made: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.npz"
    file.write(own, replace(file.read(made), draft=hash_weights(CHAIN)))
    said = {}
    for path in (own, made):
        config = {
            "engine": {"url": "http://127.0.0.1:9"},
            "store": {"url": f"sqlite:///{tmp_path / 'dw.db'}"},
            "models": [{"tokenizer": str(TARGET), "drafts": [{"path": str(CHAIN), "sketch": str(path)}]}],
        }
        settings = tmp_path / "settings.yaml"
        settings.write_text(json.dumps(config))
        shown = CliRunner().invoke(doctor, ["--config", str(settings)]).stdout.splitlines()
        (said[path],) = (line for line in shown if f"sketch {path}" in line)
    assert "ok" in said[own]
    assert "belongs to its draft, learnt from 130 prompts" in said[own]
    assert "problem" in said[made]
    assert "belongs to draft abababababab" in said[made]
