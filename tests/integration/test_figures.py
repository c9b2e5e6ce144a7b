"""What the shadow knows of a request beyond the draft's weights, from a real target and draft into the store."""

from __future__ import annotations

import json
from pathlib import Path

import sqlalchemy as sa
from safetensors.torch import load_file

from driftwatch.records import Record
from driftwatch.settings import Settings
from driftwatch.shadow.surprise import is_chosen
from driftwatch.shadow.worker import Worker
from driftwatch.store import samples
from driftwatch.store.connection import Store
from driftwatch.store.schema import Replay

DATA = Path(__file__).parents[1] / "data"
COUNT = 40


def test_replays_carry_the_targets_surprise_and_what_the_draft_cannot_propose(sqlite_store: Store) -> None:
    models = DATA / "models"
    draft = {"name": "incumbent", "path": str(models / "eagle3")}
    settings = Settings(
        models=[{"target": str(models / "target"), "drafts": [draft], "gamma": 3}],
        shadow={"device": "cpu", "threads": 1},
    )
    rows = [json.loads(line) for line in (DATA / "traces" / "eagle3.T0.8.jsonl").read_text().splitlines()[:COUNT]]
    with sqlite_store.write() as session:
        records = [(Record(**row), ("incumbent",)) for row in rows]
        samples.add(session, records, now=1.0, max_segments=10)
    worker = Worker(settings, sqlite_store)
    while worker.step():
        pass
    head = load_file(models / "eagle3" / "model.safetensors")
    proposable = {int(i) for i in head["t2d"].nonzero()[:, 0]}
    with sqlite_store.read() as session:
        replays = list(session.scalars(sa.select(Replay).order_by(Replay.sample_id)))
    assert len(replays) == COUNT
    for replay, row in zip(replays, rows, strict=True):
        figures = replay.figures or {}
        served = row["output_token_ids"][1:]
        assert figures["outside"] == sum(token not in proposable for token in served)
        assert ("logprob" in figures) == is_chosen(replay.sample_id)
        if "logprob" in figures:
            assert figures["compared"] == len(served)
            assert -10.0 < figures["logprob"] / len(served) < 0.0 < figures["entropy"] / len(served) < 8.0
    assert sum(replay.figures["outside"] for replay in replays if replay.figures) > 0
    assert any("logprob" in (replay.figures or {}) for replay in replays)
