"""A shadow with a sketch: real draft, real store, recorded requests; each is judged on its side."""

from __future__ import annotations

import json
import shutil
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from driftwatch.control.app import create_app
from driftwatch.control.judge import fold
from driftwatch.drift.sketch import file
from driftwatch.drift.sketch.build import Row, build
from driftwatch.drift.sketch.sketch import Sketch
from driftwatch.errors import SettingsError, SketchError
from driftwatch.records import parse_record
from driftwatch.retrain import candidates
from driftwatch.retrain.progress import advance
from driftwatch.retrain.request import request
from driftwatch.settings import Settings, load
from driftwatch.shadow.corpus import input_embedding
from driftwatch.shadow.draft import hash_weights
from driftwatch.shadow.tokenizer import Retokeniser
from driftwatch.shadow.worker import Worker
from driftwatch.store import samples
from driftwatch.store.connection import Store
from driftwatch.store.schema import Cell, Replay, Retrain, Sample

from .retraining import alarm, controlled, settings_of

DATA = Path(__file__).parents[1] / "data"
CHAIN, TARGET = DATA / "models" / "chain", DATA / "models" / "target"
TRACE = DATA / "traces" / "draft3.T0.jsonl"
LENGTHS = (16, 32, 48, 64, 90)


@pytest.fixture(scope="module")
def sketch() -> Sketch:
    """Of what the chain draft was trained on: Python sources, here the ones of this interpreter."""
    tokenizer = Retokeniser(TARGET)
    rows = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]:
        ids = tokenizer.encode(path.read_text(errors="replace")[:12_000])
        for i, start in enumerate(range(0, len(ids) - 160, 200)):
            prompt = ids[start : start + LENGTHS[i % len(LENGTHS)]]
            rows.append(Row(np.array(prompt), np.array(ids[start : start + 154])))
    return build(rows, input_embedding(CHAIN, None), draft=hash_weights(CHAIN))


def configured(path: Path, draft: Path = CHAIN) -> Settings:
    drafts = [
        {"name": "incumbent", "path": str(draft), "sketch": str(path)},
        {"name": "plain", "path": str(draft)},
    ]
    return Settings(
        models=[{"name": "*", "drafts": drafts, "gamma": 3}],
        shadow={"device": "cpu", "threads": 1},
    )


def stored(store: Store, records: list[dict[str, Any]]) -> None:
    batch = [(parse_record(json.dumps(one), where="x"), ["incumbent", "plain"]) for one in records]
    with store.write() as session:
        samples.add(session, batch, now=time.time(), max_segments=100)


def test_replays_carry_their_side_and_why(store: Store, sketch: Sketch, tmp_path: Path) -> None:
    path = tmp_path / "chain.npz"
    file.write(path, sketch)
    settings = configured(path)
    records = [json.loads(line) for line in TRACE.read_text().splitlines()]
    for one in records:
        one["labels"] = {}
        one["model"] = "m"
    stored(store, records)
    worker = Worker(settings, store)
    while worker.step():
        pass
    fold(store, settings, time.time())
    verdicts = sketch.score([one["prompt_token_ids"] for one in records])
    expected = {one["id"]: verdict for one, verdict in zip(records, verdicts, strict=True)}
    found = sa.select(Sample.request_id, Replay).join(Replay, Replay.sample_id == Sample.id)
    with store.read() as session:
        for id, replay in session.execute(found).all():
            figures, views = replay.figures or {}, expected[id].views
            if replay.draft == "plain":
                assert (replay.split, figures.get("p")) == ("none", None)
                continue
            assert views is not None
            assert (replay.split, figures["p"], figures["novelty"]) == (
                expected[id].side,
                expected[id].p,
                views.novelty,
            )
            assert 0.0 <= figures["output_novelty"] <= 1.0
        cells = {
            cell.split: cell.sums["requests"]
            for cell in session.scalars(sa.select(Cell).where(Cell.draft == "incumbent", Cell.channel == "shadow"))
        }
    sides = [one.side for one in expected.values()]
    assert cells == {side: sides.count(side) for side in ("on", "off")}
    with TestClient(create_app(store, settings)) as client:
        (told,) = client.get("/v1/sketches").json()["sketches"]
    assert (told["draft"], told["gamma"], told["requests"]) == ("incumbent", 3, 72)
    assert told["off"]["value"] == pytest.approx(sides.count("off") / 72)
    with store.read() as session:
        replays = session.scalars(sa.select(Replay).where(Replay.draft == "incumbent")).all()
    said = [replay.figures or {} for replay in replays]
    novelty = np.mean([figures["output_novelty"] for figures in said])
    assert told["output_novelty"]["value"] == pytest.approx(novelty)
    assert told["output_novelty"]["lower"] < novelty < told["output_novelty"]["upper"]
    outside = sum(figures["outside"] for figures in said) / sum(replay.tokens for replay in replays)
    assert told["outside_draft_vocabulary"]["value"] == pytest.approx(outside)
    assert told["acceptance"]["answer"] == "informative"
    assert told["acceptance"]["difference"]["lower"] > 0.0
    assert sum(tenth["hit_rate"]["requests"] for tenth in told["acceptance"]["tenths"]) == 72
    off = {domain: [one.side for id, one in expected.items() if id[0] == domain].count("off") for domain in "AB"}
    assert off["B"] > 18 > 2 * off["A"]  # of 36 each: prose, and Python sources that nothing was trained on


def test_a_sketch_of_another_draft_stops_the_shadow(sqlite_store: Store, sketch: Sketch, tmp_path: Path) -> None:
    path = tmp_path / "chain.npz"
    file.write(path, sketch)
    other = Path(__file__).parents[2] / "driftwatch" / "demo" / "draft"
    with pytest.raises(SketchError, match=f"belongs to draft {sketch.draft[:12]}, this draft is "):
        Worker(configured(path, other), sqlite_store)
    with pytest.raises(SketchError, match="No such file"):
        Worker(configured(tmp_path / "none.npz"), sqlite_store)


def test_a_sketch_without_a_draft_is_a_mistake(tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("models: [{drafts: [{name: incumbent, sketch: s.npz}]}]\n")
    with pytest.raises(SettingsError, match="sketch needs path"):
        load(config)


def test_a_candidate_is_judged_on_each_side_of_the_incumbents_sketch(
    store: Store, sketch: Sketch, tmp_path: Path
) -> None:
    """A sketch belongs to one draft's weights: the candidate has none, and is judged by the incumbent's."""
    path = tmp_path / "chain.npz"
    file.write(path, sketch)
    shutil.copytree(CHAIN, tmp_path / "candidates" / "new")
    settings = settings_of(tmp_path, data={"low_share": 0, "replay_share": 0}).model_copy(
        update={"models": configured(path).models}
    )
    records = [json.loads(line) for line in TRACE.read_text().splitlines()]
    worker = Worker(settings, store)
    with controlled(store, settings) as client:
        rows = [one | {"labels": {"tenant": "a"}, "model": "m"} for one in records]
        assert client.post("/v1/samples", json=rows).json()["stored"] == len(rows)
        while worker.step():
            pass
        fold(store, settings, time.time())
        retrain = alarm(store, settings, start=time.time() + 60)  # nothing since: all of it is history
        assert request(store, settings, time.time()) == 0
        with store.write() as session:
            advance(session, session.get_one(Retrain, retrain.id), "requested", time.time())
        answer = client.post(
            f"/v1/retrains/{retrain.id}/candidate", json={"path": str(tmp_path / "candidates" / "new")}
        )
        assert answer.status_code == 202, answer.text
        while worker.step():
            pass
        candidates.judge(store, settings, time.time())
        (candidate,) = client.get("/v1/candidates").json()["candidates"]
    verdicts = sketch.score([one["prompt_token_ids"] for one in records])
    sides = Counter(verdict.side for verdict in verdicts)
    assert {row["split"]: row["requests"] for row in candidate["verdict"]["table"]} == dict(sides)
    assert len(sides) == 2
