"""Events that get no more requests, tests whose finding another event told, and what then leaves the metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from driftwatch.control import canary, leftovers
from driftwatch.control.app import create_app
from driftwatch.control.judge import expire, fold
from driftwatch.drift.cell import CellState
from driftwatch.settings import Settings
from driftwatch.store import retention
from driftwatch.store.connection import Store
from driftwatch.store.deployments import TAKEN_OVER
from driftwatch.store.schema import Cell, Deployment, Event, Monitor, Sample

from .test_causes import DAY, FACTS, LEARNING, NORMAL, SETTINGS, Period, Stream
from .test_control import metrics

KEPT = 90
HOUR = 3600.0
AGAIN = "another deployment or draft has taken over"


@pytest.fixture
def settings() -> Settings:
    return Settings(**SETTINGS)


@pytest.fixture
def stream(store: Store, settings: Settings) -> Iterator[Stream]:
    with TestClient(create_app(store, settings), raise_server_exceptions=False) as client:
        yield Stream(store, settings, client)


def age(store: Store, seconds: float, *where: Any) -> None:
    """Let all that is stored of some deployments, or of all, have happened so much earlier."""
    ids = sa.select(Deployment.id).where(*where)
    updates = [
        sa.update(Cell).where(Cell.deployment_id.in_(ids)).values(updated_at=Cell.updated_at - seconds),
        sa.update(Monitor).where(Monitor.deployment_id.in_(ids)).values(updated_at=Monitor.updated_at - seconds),
        sa.update(Deployment).where(*where).values(last_seen=Deployment.last_seen - seconds),
        sa.update(Sample).where(Sample.deployment_id.in_(ids)).values(arrived_at=Sample.arrived_at - seconds),
    ]
    with store.write() as session:
        for statement in updates:
            session.execute(statement)


def closed(event: dict[str, Any]) -> str | None:
    found = event["details"].get("closed")
    return None if found is None else str(found.get("reason"))


def segments(found: dict[str, dict[tuple[tuple[str, str], ...], float]], name: str) -> set[str]:
    return {dict(labels)["segment"] for labels in found.get(name, {})}


WORSE = replace(NORMAL, on=0.5, off=0.1, facts=FACTS | {"target": "m-8b"})


@pytest.mark.parametrize("fingerprint", [False, True])
def test_rolling_back_ends_what_the_worse_one_had_opened(stream: Stream, fingerprint: bool) -> None:
    """The recommended action was taken: its event must not stay, and the figures are those of what serves again."""
    worse = replace(NORMAL, on=0.5, off=0.1, fingerprint="g") if fingerprint else WORSE
    stream.send(NORMAL, LEARNING)
    stream.send(worse, LEARNING)
    (regressed,) = stream.events("deployment_regressed")
    assert regressed["closed_at"] is None
    stream.send(NORMAL, TAKEN_OVER)
    with stream.store.read() as session:
        cell = session.scalars(sa.select(Cell).where(Cell.channel == "shadow").order_by(Cell.id.desc())).first()
        assert cell is not None
        key = (Cell.fingerprint == "g") if fingerprint else (Cell.deployment_id == cell.deployment_id)
    expire(stream.store, stream.settings, time.time())
    (regressed,) = stream.events("deployment_regressed")
    assert regressed["closed_at"] is None, "requests of a roll-out may still come"
    with stream.store.write() as session:
        session.execute(sa.update(Cell).where(key).values(updated_at=Cell.updated_at - HOUR - 1))
    expire(stream.store, stream.settings, time.time())
    (regressed,) = stream.events("deployment_regressed")
    assert closed(regressed) == AGAIN
    found = metrics(stream.client)
    rates = [value for labels, value in found["driftwatch_baseline_hit_rate"].items() if ("split", "on") in labels]
    assert rates == [pytest.approx(0.8, abs=0.03)]


def test_a_drift_of_what_was_rolled_back_ends_and_may_come_again(stream: Stream) -> None:
    new = replace(NORMAL, facts=FACTS | {"version": "0.33.0"})
    stream.send(NORMAL, LEARNING)
    stream.send(new, LEARNING)
    stream.send(replace(new, engine_loss=0.4), 200)
    (gap,) = stream.events("live_gap")
    stream.send(NORMAL, TAKEN_OVER)
    expire(stream.store, stream.settings, time.time())
    assert closed(stream.events("live_gap")[0]) is None
    age(stream.store, HOUR + 1, Deployment.id == 2)
    expire(stream.store, stream.settings, time.time())
    (gap,) = stream.events("live_gap")
    assert closed(gap) == AGAIN
    assert stream.sent_types().count("driftwatch.drift.closed") == stream.sent_types().count("driftwatch.drift.opened")
    with stream.store.read() as session:
        states = [row.state["monitor"] for row in session.scalars(sa.select(Monitor).where(Monitor.deployment_id == 2))]
    assert all(state is None or state["opened_index"] is None for state in states)
    stream.send(replace(new, engine_loss=0.4), 200)
    assert [event["closed_at"] is None for event in stream.events("live_gap")] == [False, True]


def test_canaries_that_nobody_asks_any_more_end_too(stream: Stream) -> None:
    new = replace(NORMAL, facts=FACTS | {"target": "m-8b"})
    stream.send(NORMAL, 5)
    stream.send(new, 40)
    prompts = [f"prompt {number}" for number in range(20)]
    with stream.store.write() as session:
        for text in ["as ever"] * canary.REFERENCE_RUNS + ["otherwise"] * 2:
            answers = {number: canary.Answer(text, None) for number in range(len(prompts))}
            canary.take(session, stream.settings, 2, prompts, answers, time.time())
    assert len(stream.events("canary")) == 1
    stream.send(NORMAL, TAKEN_OVER)
    expire(stream.store, stream.settings, time.time())
    assert closed(stream.events("canary")[0]) is None
    age(stream.store, HOUR + 1, Deployment.id == 2)
    expire(stream.store, stream.settings, time.time())
    assert closed(stream.events("canary")[0]) == AGAIN


def test_a_fall_that_another_event_told_is_told_again_once_that_one_is_over(stream: Stream) -> None:
    """Odd requests come in numbers, and go; those that stay are harder than odd ones used to be."""
    harder = replace(NORMAL, off=0.1)
    stream.send(NORMAL, LEARNING)
    stream.send(replace(harder, off_share=0.6), 300)
    (share,) = stream.events("off_share")
    assert "drift" in share["details"]["also"]
    assert stream.events("drift") == []
    stream.send(replace(harder, off_share=0.1), 200)
    (share,) = stream.events("off_share")
    assert share["closed_at"] is not None
    stream.send(replace(harder, off_share=0.2), 600)
    drift = [event for event in stream.events("drift") if event["split"] == "off"]
    assert [event["closed_at"] for event in drift] == [None]


def test_a_fall_that_two_events_told_stays_told_until_both_are_over(stream: Stream) -> None:
    harder = replace(NORMAL, off=0.1)
    stream.send(NORMAL, LEARNING)
    stream.send(replace(harder, off_share=0.6), 300)
    with stream.store.write() as session:
        (share,) = session.scalars(sa.select(Event).where(Event.kind == "off_share"))
        columns = {column.key: getattr(share, column.key) for column in Event.__table__.columns}
        session.add(Event(**columns | {"id": "second", "kind": "surprise"}))

    def off() -> str:
        with stream.store.read() as session:
            query = sa.select(Cell.state).where(Cell.channel == "shadow", Cell.split == "off")
            return CellState.from_json(session.scalars(query).one()).state

    stream.send(replace(harder, off_share=0.1), 200)
    (share_now,) = stream.events("off_share")
    assert share_now["closed_at"] is not None
    assert off() == "drifting"
    with stream.store.write() as session:
        now = time.time()
        session.get_one(Event, "second").closed_at = now
        leftovers.told_by(session, stream.settings, now)
    assert off() == "watching"


def test_a_segment_that_has_gone_takes_its_event_and_its_series_along(stream: Stream) -> None:
    stream.send(NORMAL, LEARNING)
    stream.send(replace(NORMAL, on=0.5), 150)
    assert {event["closed_at"] for event in stream.events("drift")} == {None}
    before = metrics(stream.client)
    names = ["shadow_requests_total", "live_requests_total", "drift_active", "baseline_state", "samples_total"]
    names += ["drift_evidence_ratio", "live_drift_active", "estimated_tokens_total"]
    for name in names:
        assert segments(before, f"driftwatch_{name}") == {"tenant=a"}
    now = time.time()
    retention.prune(stream.store, now=now + 80 * DAY, payload_days=7, replay_days=KEPT)
    expire(stream.store, stream.settings, now + 80 * DAY)
    assert stream.events("drift")[0]["closed_at"] is None
    retention.prune(stream.store, now=now + 91 * DAY, payload_days=7, replay_days=KEPT)
    expire(stream.store, stream.settings, now + 91 * DAY)
    assert {closed(event) for event in stream.events("drift")} == {"no request since the store let go of the last one"}
    age(stream.store, 91 * DAY)
    found = metrics(stream.client)
    for name in names:
        assert segments(found, f"driftwatch_{name}") == set()
    assert "driftwatch_deployment_info" not in found
    stream.send(NORMAL, 1)
    again = metrics(stream.client)
    for name in ("shadow_requests_total", "live_requests_total", "samples_total"):
        lifetime = sum(before[f"driftwatch_{name}"].values())
        assert 0 < sum(again[f"driftwatch_{name}"].values()) <= lifetime + 2, "it goes on where it was"
    assert again["driftwatch_live_requests_total"] == {
        key: value + 1 for key, value in before["driftwatch_live_requests_total"].items()
    }


def test_one_cell_that_is_old_stays_in_the_sum_of_its_name(stream: Stream) -> None:
    """Or a counter of all deployments would fall."""
    stream.send(NORMAL, 50)
    age(stream.store, 200 * DAY)
    stream.send(replace(NORMAL, facts=FACTS | {"version": "0.33.0"}), 10)
    found = metrics(stream.client)
    assert sum(found["driftwatch_live_requests_total"].values()) == 60
    assert [dict(labels)["version"] for labels in found["driftwatch_deployment_info"]] == ["0.33.0"]


def test_a_draft_that_is_not_set_any_more_leaves_no_event_open(store: Store, settings: Settings) -> None:
    with TestClient(create_app(store, settings)) as client:
        stream = Stream(store, settings, client)
        stream.send(NORMAL, LEARNING)
        stream.send(replace(NORMAL, on=0.5), 150)
        assert stream.events("drift")
        drafts = [{"name": "next", "path": "unused"}]
        renamed = Settings(**SETTINGS | {"models": [SETTINGS["models"][0] | {"drafts": drafts}]})
        age(store, HOUR + 1)
        expire(store, renamed, time.time())
        assert {closed(event) for event in stream.events("drift")} == {"the settings no longer name this draft"}


def test_a_larger_proposal_length_stops_no_event(stream: Stream) -> None:
    """Hours from before it hold no column for it."""
    longer = Settings(**SETTINGS | {"models": [SETTINGS["models"][0] | {"gamma": 12}]})
    stream.send(NORMAL, LEARNING)
    for period in (NORMAL, replace(NORMAL, on=0.4)):
        stream.send(period, LEARNING, folded=False)
        fold(stream.store, longer, time.time())
    assert [event["details"]["gamma"] for event in stream.events("drift") if event["channel"] == "shadow"] == [12]
    assert stream.client.get("/v1/segments").status_code == 200
    stream.send(replace(NORMAL, fingerprint="g"), 5, folded=False)  # beside the longer one, in the sums of one name
    fold(stream.store, stream.settings, time.time())
    depths = metrics(stream.client)["driftwatch_shadow_accepted_at_depth_total"]
    assert max(int(dict(labels)["depth"]) for labels in depths) == 11


def test_what_is_learnt_anew_for_another_proposal_length_is_no_regression(stream: Stream) -> None:
    """Of a deployment that was compared when it came up, and was as good."""
    shorter = Settings(**SETTINGS | {"models": [SETTINGS["models"][0] | {"gamma": 2}]})
    other = replace(NORMAL, facts=FACTS | {"version": "0.33.0"})
    stream.send(NORMAL, LEARNING)
    stream.send(other, LEARNING)
    stream.send(replace(other, on=0.5, off=0.1), LEARNING, folded=False)
    fold(stream.store, shorter, time.time())
    with stream.store.read() as session:
        cells = session.scalars(sa.select(Cell).where(Cell.deployment_id == 2, Cell.channel == "shadow")).all()
    assert {(cell.gamma, cell.state["baseline"]["state"]) for cell in cells} == {(2, "frozen")}
    assert [one for one in stream.events("deployment_regressed") if one["channel"] == "shadow"] == []


@pytest.mark.parametrize(("loss", "channels"), [(0.0, set()), (0.3, {"shadow", "live"})])
def test_a_roll_out_that_changes_the_proposal_length_too_is_compared(
    stream: Stream, loss: float, channels: set[str]
) -> None:
    """Also where the new length is set while the new deployment is learning already."""
    longer = Settings(**SETTINGS | {"models": [SETTINGS["models"][0] | {"gamma": 5}]})
    new = replace(NORMAL, on=0.8 - loss, off=0.4 - loss, facts=FACTS | {"version": "0.33.0"})
    stream.send(NORMAL, LEARNING)
    stream.send(new, 15)
    stream.send(new, LEARNING, folded=False)
    fold(stream.store, longer, time.time())
    with stream.store.read() as session:
        cells = session.scalars(sa.select(Cell).where(Cell.deployment_id == 2, Cell.channel == "shadow")).all()
    assert {(cell.gamma, cell.state["baseline"]["state"]) for cell in cells} == {(5, "frozen")}
    regressed = stream.events("deployment_regressed")
    assert {cell["channel"] for event in regressed for cell in event["details"]["cells"]} == channels


def test_a_session_that_falls_silent_is_no_request(stream: Stream) -> None:
    """Closing it judges it, but when its cell and its tests were heard of stays what it was."""
    pairs = [stream._draw(NORMAL) for _ in range(40)]
    records = [record | {"session": f"s{number // 10}"} for number, (record, _) in enumerate(pairs)]
    stream.give(records, [row for _, row in pairs])
    fold(stream.store, stream.settings, time.time())

    def heard() -> tuple[list[float], list[int]]:
        with stream.store.read() as session:
            rows = [*session.scalars(sa.select(Cell).order_by(Cell.id))]
            tests = [*session.scalars(sa.select(Monitor).order_by(Monitor.id))]
        units = [len(row.state["units"]["open"]) for row in (*rows, *tests)]
        return [row.updated_at for row in (*rows, *tests)], units

    before, open_units = heard()
    assert max(open_units) > 0
    expire(stream.store, stream.settings, time.time() + DAY)
    after, open_units = heard()
    assert (after, max(open_units)) == (before, 0)


def test_the_share_off_over_all_segments_is_weighted(stream: Stream) -> None:
    """A small segment that is all off, judged as often as a large one that is not: 1 request in 10, not in 2."""

    def send(tenant: str, split: str, weight: float) -> None:
        period = Period(off_share=float(split == "off"))
        pairs = [stream._draw(period) for _ in range(40)]
        records = [record | {"labels": {"tenant": tenant}, "weight": weight} for record, _ in pairs]
        stream.give(records, [row for _, row in pairs])

    send("small", "off", 1.0)
    send("large", "on", 9.0)
    fold(stream.store, stream.settings, time.time())
    found = metrics(stream.client)
    key = (("draft", "incumbent"), ("model", "m"))
    name = "driftwatch_overall_off_distribution_ratio"
    lower, value, upper = (found[f"{name}{side}"][key] for side in ("_lower", "", "_upper"))
    assert value == pytest.approx(0.1)
    assert 0.01 < lower < 0.06
    assert 0.15 < upper < 0.3
    shares = found["driftwatch_off_distribution_ratio"]
    assert {dict(labels)["segment"]: share for labels, share in shares.items()} == {
        "tenant=small": 1.0,
        "tenant=large": 0.0,
    }
    (told,) = stream.client.get("/v1/sketches").json()["sketches"]
    assert told["off"]["value"] == pytest.approx(0.1)
    assert told["off"]["lower"] < 0.1 < told["off"]["upper"]
    with stream.store.read() as session:
        assert session.scalars(sa.select(Event)).all() == []
