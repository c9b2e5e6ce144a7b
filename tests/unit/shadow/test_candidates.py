"""Candidates in the shadow: loaded from below one folder alone, and in the incumbent's form."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from driftwatch.settings import Settings
from driftwatch.shadow.worker import Worker
from driftwatch.store.connection import Store
from driftwatch.store.work import Task

from .conftest import DATA, tokens_of, trace

CHAIN, EAGLE3, TARGET = (DATA / "models" / name for name in ("chain", "eagle3", "target"))


def task(path: Path | None = None, **fields: Any) -> Task:
    sample = tokens_of(trace("eagle3.T0")[0])
    whose = {"draft": "incumbent"} if path is None else {"draft": "candidate-1", "candidate": str(path)}
    values: dict[str, Any] = {
        "work_id": 1,
        "sample_id": 1,
        "model": "m",
        "segment": "all",
        "prompt_ids": list(sample.prompt),
        "output_ids": list(sample.output),
        "text": None,
        "temperature": None,
        "top_p": None,
        "top_k": None,
        "incumbent": None if path is None else "incumbent",
    }
    return Task(**values | whose | fields)


def worker(store: Store, folder: Path, draft: str) -> Worker:
    (folder / "candidates").mkdir(exist_ok=True)
    model = {"name": "*", "target": str(TARGET), "drafts": [{"path": draft}], "gamma": 3}
    shadow = {"device": "cpu", "threads": 1}
    return Worker(Settings(models=[model], shadow=shadow, retrain={"candidates_dir": folder / "candidates"}), store)


def test_a_candidate_is_replayed_as_the_tree_that_the_incumbent_is(sqlite_store: Store, tmp_path: Path) -> None:
    one = worker(sqlite_store, tmp_path, f"{EAGLE3}:steps=3,topk=2,tokens=6")
    new = tmp_path / "candidates" / "new"
    shutil.copytree(EAGLE3, new)
    rows = {verdict.task.draft: verdict.replay for verdict in one.judge([task(), replace(task(new), work_id=2)])}
    assert rows["incumbent"] is not None
    assert rows["incumbent"]["encoding"] == "walk"
    assert rows["candidate-1"] == rows["incumbent"]


@pytest.mark.parametrize("where", ["../outside", "link", "/etc"])
def test_one_from_elsewhere_is_not_opened_whoever_let_it_in(sqlite_store: Store, tmp_path: Path, where: str) -> None:
    """Control looked at the path; what lies there may have become another since."""
    one = worker(sqlite_store, tmp_path, str(CHAIN))
    shutil.copytree(CHAIN, tmp_path / "outside")
    (tmp_path / "candidates" / "link").symlink_to(tmp_path / "outside")
    (verdict,) = one.judge([task(tmp_path / "candidates" / where)])
    assert verdict.skipped == "candidate_refused"
    (inside,) = one.judge([task(shutil.copytree(CHAIN, tmp_path / "candidates" / "new"), draft="candidate-2")])
    assert inside.replay is not None


def test_a_candidate_may_take_the_place_of_prompt_lookup(sqlite_store: Store, tmp_path: Path) -> None:
    """Whose name looks like a folder with a tree, and is none."""
    one = worker(sqlite_store, tmp_path, "ngram:min=1,max=3")
    (verdict,) = one.judge([task(shutil.copytree(CHAIN, tmp_path / "candidates" / "new"))])
    assert (verdict.skipped, verdict.replay is not None) == (None, True)
