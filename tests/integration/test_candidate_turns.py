"""A comparison however large keeps no fresh sample waiting, and is not kept waiting by them; on both databases."""

from __future__ import annotations

from collections import Counter

import pytest
import sqlalchemy as sa

from driftwatch.store import candidates, work
from driftwatch.store.connection import Store
from driftwatch.store.schema import Candidate, Event, Retrain, Sample, Turn, Work

from .test_scale import add, finish, lease

HISTORY = 1000


@pytest.fixture
def candidate(store: Store) -> Candidate:
    """One whose history is a thousand judged samples of tenant a."""
    add(store, "a", range(HISTORY))
    while tasks := lease(store, 64):
        finish(store, tasks)
    with store.write() as session:
        none = {"segment": "tenant=a", "split": "none", "draft": "incumbent", "cause": "unknown", "request_id": "x"}
        session.add(Event(id="e", kind="drift", opened_at=1.0, details={}, **none))
        session.flush()
        session.add(Retrain(id="r", event_id="e", state="evaluating", created_at=1.0, updated_at=1.0))
        session.flush()
        one = Candidate(
            id="candidate-1",
            retrain_id="r",
            model="",
            incumbent="incumbent",
            path="/c",
            state="history",
            history_until=0,
            queued_until=0,
            queued_live=0,
            details={},
            created_at=1.0,
            updated_at=1.0,
        )
        session.add(one)
        session.flush()
        candidates.queue(session, one, list(session.scalars(sa.select(Sample.id))), 1.0)
    return one


def kinds(tasks: list[work.Task]) -> Counter[str]:
    return Counter(
        "candidate" if task.candidate is not None else task.segment.removeprefix("tenant=") for task in tasks
    )


def test_fresh_samples_of_the_same_segment_do_not_wait_for_a_comparison(store: Store, candidate: Candidate) -> None:
    finish(store, lease(store, 64))
    add(store, "a", range(HISTORY, HISTORY + 20))
    assert kinds(lease(store, 40)) == {"candidate": 20, "a": 20}
    assert kinds(lease(store, 40)) == {"candidate": 40}


def test_a_comparison_counts_as_one_segment_among_others(store: Store, candidate: Candidate) -> None:
    finish(store, lease(store, 64))
    add(store, "a", range(HISTORY, HISTORY + 200))
    add(store, "b", range(200))
    assert kinds(lease(store, 60)) == {"candidate": 20, "a": 20, "b": 20}


def test_a_backlog_does_not_keep_a_comparison_waiting(store: Store) -> None:
    """The other way round: what waits already has no right to go first throughout."""
    add(store, "a", range(500))
    finish(store, lease(store, 20))
    with store.write() as session:
        rows = list(session.scalars(sa.select(Sample.id).order_by(Sample.id).limit(20)))
        candidates.queue(session, Candidate(id="candidate-2"), rows, 1.0)
    leased = lease(store, 40)
    assert Counter(task.draft for task in leased) == {"candidate-2": 20, "incumbent": 20}


def test_one_that_is_over_leaves_no_turn_behind(store: Store, candidate: Candidate) -> None:
    with store.write() as session:
        candidates.drop_work(session, candidate)
    with store.read() as session:
        assert set(session.scalars(sa.select(Turn.segment))) == {"tenant=a"}
        waiting = sa.select(sa.func.count()).select_from(Work).where(Work.state == "pending")
        assert session.scalar(waiting) == 0
