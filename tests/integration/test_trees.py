"""A draft tree through the store: worked off by the shadow, folded into a cell of its own proposal length."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from driftwatch.acceptance import tally
from driftwatch.control.app import create_app
from driftwatch.control.judge import expire, fold
from driftwatch.records import read_records
from driftwatch.settings import Settings
from driftwatch.shadow.device import pick_device, pick_dtype
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.eagle3.rollout import Eagle3TreeDraft
from driftwatch.shadow.open import Opening, open_draft
from driftwatch.shadow.target import Target
from driftwatch.shadow.worker import Worker
from driftwatch.store import replays
from driftwatch.store.connection import Store

DATA = Path(__file__).parents[1] / "data"
TARGET = DATA / "models" / "target"


@pytest.mark.parametrize(("steps", "configured"), [(5, 3), (10, 12)])
def test_a_cell_of_a_tree_has_its_steps(store: Store, steps: int, configured: int) -> None:
    """Whatever proposal length is configured, smaller or larger, and over several rounds of folding."""
    path = f"{DATA / 'models' / 'eagle3'}:steps={steps},topk=4,tokens=8"
    model = {"name": "*", "target": str(TARGET), "gamma": configured, "drafts": [{"name": "tree", "path": path}]}
    settings = Settings(models=[model], shadow={"device": "cpu", "threads": 1}, control={"tick_s": 3600})
    worker = Worker(settings, store)
    records = list(read_records([DATA / "traces" / "eagle3.T0.jsonl"]))[:6]
    samples = [Tokens(one.prompt_token_ids or (), one.output_token_ids or ()) for one in records]
    device = pick_device("cpu")
    target = Target(TARGET, device=device, dtype=pick_dtype("auto", device))
    draft = open_draft(path, Opening(device, pick_dtype("auto", device)), target)
    assert isinstance(draft, Eagle3TreeDraft)
    expected = sum((tally(one, steps) for one in draft.replay(samples[1:])), tally(draft.replay(samples[:1])[0], steps))
    with TestClient(create_app(store, settings)) as client:
        for part in (records[:2], records[2:]):
            body = "\n".join(one.model_dump_json(exclude_none=True, exclude={"engine"}) for one in part)
            assert client.post("/v1/samples", content=body).status_code == 201
            assert worker.step() == len(part)
            fold(store, settings, time.time())
        expire(store, settings, time.time())
        with store.read() as session:
            assert all(one.weights.walked for one in replays.all_judged(session))
        (segment,) = client.get("/v1/segments").json()["segments"]
        metrics = client.get("/metrics").text
    (cell,) = segment["cells"]
    assert cell["gamma"] == steps
    figures = expected.figures(steps)
    assert {key: cell["counts"][key] for key in figures} == figures
    assert cell["recent"]["acceptance_length"]["value"] == pytest.approx(figures["acceptance_length"])
    assert "driftwatch_shadow_accepted_tokens_total" in metrics
