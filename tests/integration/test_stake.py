"""What a fall costs a day, from requests to the decision on training, on both databases."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from driftwatch.acceptance import Tally, tally
from driftwatch.control.app import create_app
from driftwatch.control.judge import fold
from driftwatch.control.stake import MOST
from driftwatch.drift.sums import Sums
from driftwatch.economics.price import price
from driftwatch.economics.stake import per_day
from driftwatch.economics.value import of_sums
from driftwatch.settings import Settings
from driftwatch.store.connection import Store
from driftwatch.store.schema import Event, Retrain, Sample

from .test_causes import GAMMA, TOKENS
from .test_live import SETTINGS as LIVE
from .test_live import trace
from .test_value import PROFILE, Kind, Requests, running

PRICE = {"gpu_hour_price": 3.6, "gpus": 2}
BEFORE, SINCE = 400, 200


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE.to_json()))
    return path


def falls(stream: Requests) -> tuple[dict[str, Any], Retrain]:
    """Acceptance falls from .8 to .4 at a batch of 9; the event, and the decision on it."""
    stream.more(Kind((0.8,), running=9.0), BEFORE)
    stream.more(Kind((0.4,), running=9.0), SINCE)
    (event,) = stream.events("drift")
    with stream.store.read() as session:
        (retrain,) = session.scalars(sa.select(Retrain).where(Retrain.event_id == event["id"]))
    return event, retrain


def priced(tallies: list[Tally]) -> Any:
    """Per million tokens, by the pure functions alone."""
    sums = sum(map(Sums.request, tallies), Sums.zero(GAMMA))
    (value,) = of_sums(sums, PROFILE, batch=9.0, gammas=[GAMMA])
    return price(value, PROFILE, per_gpu_hour=3.6, gpus=2).speculative


def test_the_gain_is_what_the_tokens_of_a_day_cost_more(store: Store, profile: Path) -> None:
    policy = {"policy": {"min_value_per_day": 1e-9}}
    with running(store, {"profile": str(profile)}, value=PRICE, retrain=policy) as stream:
        event, retrain = falls(stream)
        start = event["details"]["start_served_at"]
        with store.read() as session:
            served = {one.request_id: one.served_at for one in session.scalars(sa.select(Sample))}
            opened = session.get_one(Event, event["id"]).opened_at
        judged = [(served[one.request_id], tally(one.weights, GAMMA)) for one in stream.judged()]
    sides = [[found for at, found in judged if (at >= start) == later] for later in (False, True)]
    before, since = (priced(side[-MOST:]) for side in sides)
    stake = event["details"]["value_per_day"]
    tokens = (BEFORE + SINCE) * TOKENS
    assert stake["tokens_per_day"] == tokens
    assert stake["requests"] == dict(zip(("before", "now"), (min(len(side), MOST) for side in sides), strict=True))
    assert stake["per_million_tokens"]["now"] == pytest.approx(since.to_json())
    expected = per_day(before, since, tokens)
    assert [stake["value"], stake["lower"], stake["upper"]] == pytest.approx(expected.to_json())
    assert 0.0 < stake["lower"] < stake["value"] < stake["upper"]
    assert retrain.decision is not None
    assert not [reason for reason in retrain.decision["reasons"] if "gain" in reason]
    told = {key: stake[key] for key in ("value", "lower", "upper")}
    assert retrain.decision["asked"]["value_per_day"] == told
    assert opened >= start


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (PRICE, " to "),
        ({}, "the expected gain a day is unknown, retrain.policy.min_value_per_day 1000.0"),
    ],
)
def test_too_little_or_unknown_is_a_no_that_says_so(
    store: Store, profile: Path, value: dict[str, Any], said: str
) -> None:
    policy = {"policy": {"min_value_per_day": 1000.0}}
    with running(store, {"profile": str(profile)}, value=value, retrain=policy) as stream:
        event, retrain = falls(stream)
        listed = stream.client.get(f"/v1/retrains/{retrain.id}").json()
    assert retrain.state == "suppressed"
    (reason,) = listed["decision"]["reasons"]
    assert reason.startswith("the expected gain a day is ")
    assert said in reason
    assert (event["details"]["value_per_day"] is None) == (not value)


def test_without_a_replay_the_engines_own_figures_are_priced(store: Store, profile: Path, tmp_path: Path) -> None:
    """Recorded requests of vLLM 0.32, on its draft's own domain and then on the other: .87 to .50."""
    models = [{"name": "*", "drafts": [{"name": "eagle-v7"}], "gamma": 3, "profile": str(profile), "batch": 4}]
    more = {"models": models, "value": PRICE, "retrain": {"export_dir": tmp_path / "exports"}}
    settings = Settings(**LIVE | more)
    with TestClient(create_app(store, settings)) as client:
        for domain in "AB":
            rows = trace("draft3.T0", domain, repeat=3)
            assert client.post("/v1/samples", json=rows).json()["stored"] == len(rows)
            fold(store, settings, time.time())
        events = [one for one in client.get("/v1/events").json()["events"] if one["kind"] == "drift"]
    (event,) = events
    stake = event["details"]["value_per_day"]
    assert 0.0 < stake["lower"] < stake["value"] < stake["upper"]
    tokens = [len(row["output_token_ids"]) - 1 for domain in "AB" for row in trace("draft3.T0", domain, repeat=3)]
    assert stake["tokens_per_day"] == sum(tokens)
    assert sum(stake["requests"].values()) == len(tokens)
