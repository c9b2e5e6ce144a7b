"""Each cause of the table through control on both databases: samples and replays in, events with their causes out.

Requests are seeded draws of what a replay and an engine would say of them; the two recorded faults are vLLM's own
figures beside a right replay of the same requests (tests/unit/drift/test_recorded.py says which).
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from driftwatch.acceptance import Weights, accepted_per_window
from driftwatch.control import changes, judge
from driftwatch.control.app import create_app
from driftwatch.control.beside import Beside
from driftwatch.control.judge import expire, fold
from driftwatch.settings import Settings
from driftwatch.store import work
from driftwatch.store.connection import Store
from driftwatch.store.schema import Cell, CellHour, Delivery, Deployment, Event, Monitor, Replay, Retrain, Sample

from .test_control import metrics

TESTS = Path(__file__).parents[1]
TRACES = TESTS / "data" / "traces"
REPLAYS = json.loads((TESTS / "unit" / "drift" / "recorded" / "replays.json").read_text())
GAMMA, TOKENS = 3, 48
DAY = 86_400.0
LEARNING = 400
"""Requests after which every test but that of the gap has learnt what is normal."""
FACTS = {"engine": "vllm", "version": "0.32.0", "target": "m-7b", "speculative": "draft v1"}
SETTINGS: dict[str, Any] = {
    "models": [
        {
            "name": "*",
            "target": "unused",
            "drafts": [{"name": "incumbent", "path": "unused", "sketch": "unused"}],
            "gamma": GAMMA,
        }
    ],
    "detect": {
        "baseline": {"min_requests": 20, "min_hours": 0},
        "tolerance": 0.1,
        "requests_between_false_alarms": 1000,
    },
    "webhooks": [{"name": "hook", "url": "http://127.0.0.1:9/hook", "secrets": ["whsec_c2VjcmV0"]}],
    "control": {"tick_s": 3600},
}


@dataclass(frozen=True)
class Period:
    """What traffic is like."""

    on: float = 0.8
    off: float = 0.4
    off_share: float = 0.2
    engine_loss: float = 0.0
    """Chance that the engine refuses what it should have accepted."""
    surprise: float = 0.0
    facts: dict[str, str] = field(default_factory=lambda: FACTS)
    fingerprint: str = "f"
    adapter: str | None = None


NORMAL = Period()


class Stream:
    """Sends requests, and stands in for the shadow: judges what waits, and lets control fold it."""

    def __init__(self, store: Store, settings: Settings, client: TestClient) -> None:
        self.store, self.settings, self.client = store, settings, client
        self.rng = np.random.default_rng(7)
        self.sent = 0
        self.begin = datetime.now(UTC) - timedelta(hours=8)

    def send(self, period: Period, count: int, *, folded: bool = True) -> None:
        batch = [self._draw(period) for _ in range(count)]
        self.give([record for record, _ in batch], [row for _, row in batch])
        if folded:
            fold(self.store, self.settings, time.time())

    def give(self, records: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> None:
        answer = self.client.post("/v1/samples", json=list(records))
        assert answer.json()["stored"] == len(records)
        left = iter(rows)
        with self.store.write() as session:
            while tasks := work.lease(session, "test", now=time.time(), lease_s=60, limit=100):
                verdicts = [work.Verdict(task, replay=next(left)) for task in tasks]
                work.complete(session, "test", verdicts, now=time.time())

    def _draw(self, period: Period) -> tuple[dict[str, Any], dict[str, Any]]:
        off = bool(self.rng.random() < period.off_share)
        rate = min(max((period.off if off else period.on) + self.rng.normal(0.0, 0.05), 0.0), 1.0)
        weights = Weights((self.rng.random((TOKENS, 1)) < rate).astype(float))
        served = Weights(weights.values * (self.rng.random((TOKENS, 1)) >= period.engine_loss))
        windows = accepted_per_window(served, GAMMA)
        figures = {
            "p": float(self.rng.uniform(0.0, 0.05) if off else self.rng.uniform(0.05, 1.0)),
            "compared": TOKENS,
            "entropy": 2.0 * TOKENS,
            "logprob": -(2.0 + period.surprise + self.rng.normal(0.0, 0.2)) * TOKENS,
        }
        self.sent += 1
        record = {
            "id": f"r{self.sent}",
            "ts": (self.begin + timedelta(seconds=10 * self.sent)).isoformat(),
            "labels": {"tenant": "a"},
            "adapter": period.adapter,
            "model": "m",
            "deployment": period.facts,
            "prompt_token_ids": [1, 2],
            "output_token_ids": list(range(TOKENS + 1)),
            "engine": {"accepted_per_window": windows, "drafted_per_window": [GAMMA] * len(windows)},
        }
        return record, row(weights, "off" if off else "on", period.fingerprint, figures)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Those of these kinds, oldest first; all without kinds."""
        found = self.client.get("/v1/events").json()["events"]
        found.sort(key=lambda one: (one["opened_at"], one["kind"], str(one["channel"])))
        return [one for one in found if not kinds or one["kind"] in kinds]

    def sent_types(self) -> list[str]:
        with self.store.read() as session:
            return list(session.scalars(sa.select(Delivery.type).order_by(Delivery.id)))


def row(weights: Weights, split: str, fingerprint: str, figures: dict[str, Any] | None) -> dict[str, Any]:
    encoding, data = weights.encode()
    return {
        "fingerprint": fingerprint,
        "rule": "argmax",
        "split": split,
        "tokens": weights.tokens,
        "depths": weights.values.shape[1],
        "encoding": encoding,
        "weights": data,
        "proposals": None,
        "figures": figures,
    }


@pytest.fixture(autouse=True)
def _nothing_is_logged_as_a_bug(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Announcements that do not fit their published schema among them."""
    yield
    assert [one.message for one in caplog.records if "bug" in one.message] == []


@pytest.fixture
def settings() -> Settings:
    return Settings(**SETTINGS)


@pytest.fixture
def stream(store: Store, settings: Settings) -> Iterator[Stream]:
    with TestClient(create_app(store, settings), raise_server_exceptions=False) as client:
        yield Stream(store, settings, client)


def decisions(stream: Stream) -> dict[str, str]:
    """What was decided on each event, by its kind."""
    kinds = {one["id"]: one["kind"] for one in stream.events()}
    found = stream.client.get("/v1/retrains").json()["retrains"]
    return {kinds[one["event_id"]]: one["state"] for one in found}


def test_stable_traffic_raises_nothing(stream: Stream) -> None:
    stream.send(NORMAL, LEARNING)
    stream.send(NORMAL, LEARNING)
    assert stream.events() == []
    tests = stream.client.get("/v1/segments/tenant=a").json()["tests"]
    states = {test["kind"]: test["state"] for test in tests}
    assert states.pop("live_gap") in ("learning", "watching")
    assert states == dict.fromkeys(["off_share", "surprise", "agreement"], "watching")


def test_more_requests_off_the_distribution_are_traffic(stream: Stream) -> None:
    """Nothing changed within the cells: no acceptance alarm, an off-share alarm instead, and it asks for training."""
    stream.send(NORMAL, LEARNING)
    for count in (100, 310):
        stream.send(replace(NORMAL, off_share=0.6), count)
    (event,) = stream.events()
    assert (event["kind"], event["cause"], event["closed_at"]) == ("off_share", "traffic", None)
    details = event["details"]
    assert details["action"] == "retrain"
    assert "more requests are off the training distribution" in details["evidence"]
    assert details["baseline"]["upper"] < details["limit"] < details["current"]["value"]
    assert LEARNING - 10 <= int(event["start_request_id"][1:]) <= int(event["request_id"][1:]) < LEARNING + 100
    assert decisions(stream) == {"off_share": "proposed"}
    (mix,) = stream.client.get("/v1/segments").json()["mix"]
    parts = mix["split"]
    assert parts["change"]["value"] == pytest.approx(parts["after"] - parts["before"])
    assert parts["mix"]["value"] < -0.02
    assert abs(parts["rate"]["value"]) < abs(parts["mix"]["value"]) / 2
    assert set(parts["cells"]) == {"tenant=a/on", "tenant=a/off"}
    assert "mix" in details
    found = metrics(stream.client)
    key = (("draft", "incumbent"), ("model", "m"), ("segment", "tenant=a"))
    share = [found[f"driftwatch_off_distribution_ratio{side}"][key] for side in ("_lower", "", "_upper")]
    assert 0.2 < share[0] < share[1] < share[2] < 0.6
    labels = tuple(sorted([*key, ("split", "none"), ("kind", "off_share")]))
    assert found["driftwatch_drift_evidence_ratio"][labels] > 1.0
    assert found["driftwatch_drift_active"][tuple(sorted([*labels, ("cause", "traffic")]))] == 1.0
    stream.send(replace(NORMAL, off_share=0.05), 200)
    (event,) = stream.events()
    assert event["closed_at"] is not None
    assert stream.sent_types() == ["driftwatch.drift.opened", "driftwatch.drift.closed"]


def test_a_fall_within_cells_alone_is_concept(stream: Stream) -> None:
    stream.send(NORMAL, LEARNING)
    changed = replace(NORMAL, on=0.55)
    stream.send(changed, 150)
    _, replayed = stream.events()
    assert (replayed["kind"], replayed["split"], replayed["channel"]) == ("drift", "on", "shadow")
    assert decisions(stream) == {"drift": "suppressed"}, "surprise and gap may still speak; the engine's figures never"
    stream.send(changed, 500)
    for event in stream.events():
        assert (event["cause"], event["details"]["action"]) == ("concept", "retrain")
    assert sorted(one["state"] for one in stream.client.get("/v1/retrains").json()["retrains"]) == [
        "proposed",
        "suppressed",
    ]
    assert stream.sent_types()[0] == "driftwatch.drift.opened"
    found = metrics(stream.client)
    (active,) = [dict(key) for key, value in found["driftwatch_drift_active"].items() if value]
    assert (active["kind"], active["cause"], active["split"]) == ("drift", "concept", "on")


def test_a_target_that_changed_in_silence_is_found_by_its_surprise(stream: Stream) -> None:
    stream.send(NORMAL, LEARNING)
    stream.send(replace(NORMAL, on=0.55, surprise=0.5), 500)
    drift, surprise = (stream.events(kind)[0] for kind in ("drift", "surprise"))
    assert (drift["cause"], drift["details"]["action"]) == ("target", "rollback_target")
    assert (surprise["cause"], surprise["details"]["findings"]["surprise_up"]) == ("target", True)
    assert "no known fact of the deployment changed" in drift["details"]["against"]
    retrains = stream.client.get("/v1/retrains").json()["retrains"]
    with stream.store.read() as session:
        asked = [one.decision["answer"] for one in session.scalars(sa.select(Retrain)) if one.decision]
    assert retrains
    assert "retrain" not in asked, "old answers of the target are stale"


def test_an_engine_that_accepts_less_than_the_replay_is_the_engine(stream: Stream) -> None:
    stream.send(NORMAL, LEARNING)
    stream.send(replace(NORMAL, engine_loss=0.3), 300)
    (gap,) = stream.events()
    assert (gap["kind"], gap["cause"], gap["details"]["action"]) == ("live_gap", "engine", "fix_engine")
    assert "drift" in gap["details"]["also"], "the fall of the engine's own cell is no second event"
    assert "proposed" not in decisions(stream).values()
    stream.send(NORMAL, 500)
    (gap,) = stream.events()
    assert gap["closed_at"] is not None


@pytest.mark.parametrize(
    ("period", "cause", "action"),
    [
        (replace(NORMAL, on=0.5, off=0.1, facts=FACTS | {"target": "m-8b"}), "target", "rollback_target"),
        (replace(NORMAL, on=0.5, off=0.1, facts=FACTS | {"speculative": "draft v2"}), "draft", "rollback_draft"),
        (replace(NORMAL, on=0.5, off=0.1, fingerprint="g"), "draft", "rollback_draft"),
        (replace(NORMAL, engine_loss=0.4, facts=FACTS | {"version": "0.33.0"}), "engine", "fix_engine"),
    ],
)
def test_a_worse_deployment_is_no_drift_and_its_cause_is_what_changed(
    stream: Stream, period: Period, cause: str, action: str
) -> None:
    stream.send(NORMAL, LEARNING)
    stream.send(period, LEARNING)
    (regressed,) = stream.events("deployment_regressed")
    others = stream.events("drift", "off_share", "surprise", "live_gap")
    assert [one for one in others if one["channel"] == "shadow"] == []
    assert (regressed["cause"], regressed["details"]["action"]) == (cause, action)
    for cell in regressed["details"]["cells"]:
        assert cell["lower"] <= cell["difference"] <= cell["upper"] < -0.1
    assert stream.sent_types().count("driftwatch.deployment.regressed") == 1
    stream.send(replace(period, facts=FACTS | {"version": "0.34.0"}, fingerprint="i"), 10)
    (regressed,) = stream.events("deployment_regressed")
    assert regressed["closed_at"] is not None


def test_a_deployment_that_is_as_good_is_no_event(stream: Stream) -> None:
    stream.send(NORMAL, LEARNING)
    stream.send(replace(NORMAL, facts=FACTS | {"version": "0.33.0"}), LEARNING)
    assert [event["kind"] for event in stream.events()] == ["deployment_changed"]


def test_what_stands_beside_a_deployment_takes_nothing_over(stream: Stream) -> None:
    """Another adapter's first request ends no event; another version's does, and what comes back may alarm again."""
    usual = replace(NORMAL, adapter="lora-a")
    worse = replace(usual, engine_loss=0.3)
    stream.send(usual, LEARNING)
    stream.send(worse, 150)
    stream.send(replace(usual, adapter="lora-b"), 20)
    (gap,) = stream.events("live_gap")
    assert gap["closed_at"] is None
    stream.send(replace(usual, facts=FACTS | {"version": "0.33.0"}), 20)
    (gap,) = stream.events("live_gap")
    assert gap["details"]["closed"] == {"reason": "another deployment or draft has taken over"}
    stream.send(worse, 150)
    assert [event["closed_at"] is None for event in stream.events("live_gap")] == [False, True]


def valued(**model: Any) -> Settings:
    return Settings(**SETTINGS | {"models": [SETTINGS["models"][0] | model]})


@pytest.mark.parametrize(
    ("served_at", "days", "changed"),
    [(900.0, 0.0, {"target"}), (0.0, 0.0, {"target"}), (0.0, 9.0, set()), (9 * DAY, 9.0, set()), (None, 9.0, set())],
)
def test_a_wrong_clock_blames_no_old_change(
    store: Store, settings: Settings, served_at: float | None, days: float, changed: set[str]
) -> None:
    """A start that was served before its deployment was is not one of the change, unless all came in at once."""
    first = 1.7e9
    with store.write() as session:
        session.add(Deployment(id=1, model="m", facts={}, first_seen=first, last_seen=first))
        session.flush()
        known: dict[str, Any] = {"deployment_id": 1, "segment": "s", "split": "none", "draft": "d", "request_id": ""}
        facts = {"changed": {"target": ["m-7b", "m-8b"]}}
        change = Event(id="c", kind=changes.KIND, cause="target", opened_at=first, details=facts, **known)
        start = {"start_served_at": None if served_at is None else served_at + (first if served_at else 0.0)}
        event = Event(id="e", kind="slower", cause="unknown", opened_at=first + days * DAY, details=start, **known)
        session.add_all([change, event])
        session.flush()
        parts = Beside.of(session, settings, event, {}).changed
        assert parts is not None
        assert {str(part) for part in parts} == changed


def test_value_that_falls_while_acceptance_holds_is_load(store: Store) -> None:
    """Within the tolerance of drift, but below what a window costs: no draft is to blame."""
    settings = valued(break_even=2.4)
    with TestClient(create_app(store, settings)) as client:
        stream = Stream(store, settings, client)
        stream.send(replace(NORMAL, off_share=0.0, on=0.72), 500)
        assert stream.events("below_break_even", "slower", "drift") == []
        stream.send(replace(NORMAL, off_share=0.0, on=0.63), 900)
        found = stream.events("below_break_even", "slower")
        assert {event["kind"] for event in found} >= {"below_break_even"}
        for event in found:
            assert (event["cause"], event["details"]["action"]) == ("load", "lower_gamma")
        (below,) = stream.events("below_break_even")
        assert below["details"]["current"]["value"] < below["details"]["limit"] == pytest.approx(2.4)
        assert stream.events("drift") == []
        assert "proposed" not in decisions(stream).values()


def test_a_draft_that_never_paid_does_not_become_normal(store: Store) -> None:
    settings = valued(break_even=2.5)
    with TestClient(create_app(store, settings)) as client:
        stream = Stream(store, settings, client)
        stream.send(replace(NORMAL, on=0.5), 400)
        (event,) = stream.events("below_break_even")
        assert event["details"]["findings"]["never_paid"] is True
        assert (event["cause"], event["details"]["action"]) == ("unknown", "disable_speculation")
        assert int(event["request_id"][1:]) < 100


def test_repetition_is_found_where_it_is_asked_for(store: Store) -> None:
    settings = Settings(**SETTINGS | {"detect": SETTINGS["detect"] | {"two_sided": True}})
    with TestClient(create_app(store, settings)) as client:
        stream = Stream(store, settings, client)
        stream.send(NORMAL, 500)
        for count in (100, 310):
            stream.send(replace(NORMAL, on=1.0, off=1.0), count)
        (event,) = stream.events()
        assert (event["kind"], event["cause"]) == ("hit_rate_above", "unknown")
        assert decisions(stream)["hit_rate_above"] == "suppressed"


def test_live_figures_alone_are_judged_by_value_too(store: Store) -> None:
    settings = valued(drafts=[{"name": "incumbent"}], target=None, break_even=2.3)
    with TestClient(create_app(store, settings)) as client:
        stream = Stream(store, settings, client)
        stream.send(replace(NORMAL, off_share=0.0, on=0.9), 300)
        assert stream.events("drift", "below_break_even", "slower") == []
        stream.send(replace(NORMAL, off_share=0.0, on=0.5), 200)
        assert {event["channel"] for event in stream.events()} == {"live"}
        assert {event["kind"] for event in stream.events()} >= {"drift", "below_break_even"}


def recorded(name: str, repeat: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Requests with the engine's own figures, and what a right replay of the same requests said."""
    records, rows = [], []
    for number in range(repeat):
        for line in (TRACES / f"{name}.jsonl").read_text().splitlines():
            record = json.loads(line)
            windows, _ = REPLAYS[name][record["id"]]
            values = np.zeros((len(record["output_token_ids"]) - 1, GAMMA))
            at = 0
            for accepted in map(int, windows):
                values[at, :accepted] = 1.0
                at += accepted + 1
            rows.append(row(Weights(values), "none", "f", None))
            fresh = {"id": f"{name}-{record['id']}-{number}", "model": "m", "labels": {"tenant": "a"}}
            records.append(record | fresh | {"deployment": FACTS})
    return records, rows


@pytest.mark.parametrize(
    ("right", "faulty"),
    [("eagle3.T0", "eagle3wrongids.T0"), ("eagle3.T0.8", "eagle3__stockbug.T0.8")],
)
def test_recorded_faults_of_a_real_engine_come_out_as_engine(store: Store, right: str, faulty: str) -> None:
    detect = SETTINGS["detect"] | {"tolerance": 0.05}
    settings = Settings(**SETTINGS | {"detect": detect})
    with TestClient(create_app(store, settings)) as client:
        stream = Stream(store, settings, client)
        stream.give(*recorded(right, 6))
        fold(store, settings, time.time())
        assert stream.events() == []
        stream.give(*recorded(faulty, 2))
        fold(store, settings, time.time())
        (gap,) = stream.events("live_gap")
        assert (gap["cause"], gap["details"]["action"]) == ("engine", "fix_engine")
        assert gap["details"]["metric"] in ("agreement", "live_gap")
        assert {event["cause"] for event in stream.events()} == {"engine"}
        assert "proposed" not in decisions(stream).values()


def shape(store: Store) -> tuple[list[Any], list[Any], list[Any]]:
    """Everything that must not depend on how often control died."""
    with store.read() as session:
        cells = [
            (cell.segment, cell.split, cell.channel, cell.state, cell.sums) for cell in session.scalars(sa.select(Cell))
        ]
        tests = [(test.segment, test.kind, test.state) for test in session.scalars(sa.select(Monitor))]
        events = session.scalars(sa.select(Event).where(Event.kind != "deployment_changed"))
        told = [(one.kind, one.segment, one.split, one.request_id, one.start_request_id) for one in events]
    return sorted(cells, key=str), sorted(tests, key=str), sorted(told)


def test_a_control_that_is_killed_comes_to_the_same(stream: Stream) -> None:
    """All at once, and in small rounds by one process that is killed in the middle and another that goes on."""
    stream.send(NORMAL, 400, folded=False)
    stream.send(replace(NORMAL, on=0.5, surprise=0.5, engine_loss=0.3), 200, folded=False)
    fold(stream.store, stream.settings, time.time())
    at_once = shape(stream.store)
    assert {kind for kind, *_ in at_once[2]} >= {"drift", "surprise", "live_gap"}
    with stream.store.write() as session:
        for table in (Delivery, Retrain, Event, CellHour, Monitor, Cell):
            session.execute(sa.delete(table))
        session.execute(sa.update(Replay).values(folded_at=None))
        session.execute(sa.update(Sample).values(live_folded_at=None))
    killed = start(stream.store, stream.settings)
    wait_until(lambda: folded(stream.store) >= 60)
    killed.kill()
    killed.join()
    assert 60 <= folded(stream.store) < 600
    second = start(stream.store, stream.settings)
    second.join(120)
    assert second.exitcode == 0
    assert shape(stream.store) == at_once
    fold(stream.store, stream.settings, time.time())
    expire(stream.store, stream.settings, time.time())
    assert shape(stream.store) == at_once, "nothing is judged or told twice"


def folded(store: Store) -> int:
    with store.read() as session:
        return session.scalar(sa.select(sa.func.count()).where(Replay.folded_at.is_not(None))) or 0


def wait_until(done: Any) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start(store: Store, settings: Settings) -> Any:
    context = multiprocessing.get_context("spawn")
    url = store.engine.url.render_as_string(hide_password=False)
    process = context.Process(target=fold_in_small_rounds, args=(url, settings.model_dump_json()))
    process.start()
    return process


def fold_in_small_rounds(url: str, settings: str) -> None:
    judge.BATCH = 7
    store = Store(url)
    judge.fold(store, Settings(**json.loads(settings)), time.time())
    store.close()
