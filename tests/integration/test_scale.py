"""What holds at any size: turns between segments, retention in batches, lists that read no payloads."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from driftwatch.control.app import create_app
from driftwatch.records import Record
from driftwatch.settings import Settings
from driftwatch.store import migrate, retention, samples, work
from driftwatch.store.connection import Store
from driftwatch.store.schema import BudgetDay, Outcome, Payload, Replay, Sample, Work

from .test_store import DAY, REPLAY


def add(store: Store, tenant: str, numbers: range, *, tokens: int = 6, now: float = 1.0) -> None:
    ids: dict[str, Any] = {"prompt_token_ids": [1, 2, 3], "output_token_ids": [4] * (tokens - 3)}
    records = [Record(id=f"{tenant}{number}", labels={"tenant": tenant}, **ids) for number in numbers]
    with store.write() as session:
        samples.add(session, [(record, ["incumbent"]) for record in records], now=now, max_segments=100)


def lease(store: Store, limit: int, owner: str = "w", now: float = 2.0) -> list[work.Task]:
    with store.write() as session:
        return work.lease(session, owner, now=now, lease_s=60, limit=limit)


def finish(store: Store, tasks: list[work.Task], owner: str = "w") -> int:
    with store.write() as session:
        return work.complete(session, owner, [work.Verdict(task, replay=REPLAY) for task in tasks], now=3.0)


def segments(tasks: list[work.Task]) -> Counter[str]:
    return Counter(task.segment.removeprefix("tenant=") for task in tasks)


def count(store: Store, table: Any, *where: Any) -> int:
    with store.read() as session:
        return session.scalar(sa.select(sa.func.count()).select_from(table).where(*where)) or 0


def test_a_huge_backlog_of_one_segment_keeps_no_other_waiting(store: Store) -> None:
    add(store, "huge", range(3000))
    finish(store, lease(store, 64))
    add(store, "small", range(20))
    assert segments(lease(store, 40)) == {"huge": 20, "small": 20}


def test_segments_share_by_tokens_and_not_by_requests(store: Store) -> None:
    add(store, "long", range(100), tokens=60)
    add(store, "short", range(100), tokens=6)
    leased = segments(lease(store, 55))
    assert leased == {"long": 5, "short": 50}


def test_what_is_idle_saves_nothing_up(store: Store) -> None:
    add(store, "a", range(10))
    add(store, "b", range(500))
    while tasks := lease(store, 64):
        finish(store, tasks)
    add(store, "b", range(500, 600))
    add(store, "a", range(10, 110))
    assert segments(lease(store, 60)) == {"a": 30, "b": 30}, "for a while only b was served: it owes nothing for that"


OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from("ab"), st.integers(4, 40), st.integers(1, 12)),
    st.tuples(st.just("serve"), st.just(""), st.just(0), st.integers(1, 15)),
)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(operations=st.lists(OPERATIONS, min_size=2, max_size=14))
def test_two_segments_that_both_wait_get_the_same_tokens(operations: list[tuple[str, str, int, int]]) -> None:
    """Goyal et al. 1996, theorem 1: over any stretch in which both wait, their tokens differ by one piece of each."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"sqlite:///{folder}/x.db")
        migrate.upgrade(store)
        numbers = itertools.count()
        served = Counter({"a": 0, "b": 0})
        largest = Counter({"a": 0, "b": 0})
        for operation, tenant, tokens, times in operations:
            if operation == "add":
                add(store, tenant, range(first := next(numbers) * 100, first + times), tokens=tokens)
                largest[tenant] = max(largest[tenant], tokens)
                continue
            for task in itertools.chain.from_iterable(lease(store, 1) for _ in range(times)):
                finish(store, [task])
                assert task.prompt_ids is not None
                assert task.output_ids is not None
                (segment,) = segments([task])
                served[segment] += len(task.prompt_ids) + len(task.output_ids)
                waiting = [
                    count(store, Work, Work.state == "pending", Work.sample_id == Sample.id, Sample.segment == name)
                    for name in ("tenant=a", "tenant=b")
                ]
                if all(waiting):
                    assert abs(served["a"] - served["b"]) <= largest["a"] + largest["b"]
                else:
                    served.update({"a": -served["a"], "b": -served["b"]})
        store.close()


def test_the_days_budget_is_a_figure_of_its_own(store: Store) -> None:
    add(store, "a", range(3), now=DAY + 5)
    add(store, "a", range(4), now=2 * DAY + 5)
    with store.read() as session:
        assert (samples.spent(session, DAY + 9), samples.spent(session, 2 * DAY + 9)) == (18, 6)
        assert samples.spent(session, 3 * DAY) == 0
    retention.prune(store, now=4 * DAY, payload_days=1, replay_days=1)
    assert count(store, BudgetDay) == 0


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "BATCH", 7)


@pytest.mark.usefixtures("small_batches")
def test_batches_delete_all_that_is_old_and_nothing_else(store: Store) -> None:
    add(store, "old", range(30), now=1.0)
    add(store, "ahead", range(30), now=300 * DAY)  # a clock that was ahead
    add(store, "later", range(30), now=50 * DAY)
    add(store, "new", range(30), now=99 * DAY)
    tasks = lease(store, 12)
    unfolded = segments(tasks)["old"]
    finish(store, tasks)
    pruned = retention.prune(store, now=100 * DAY, payload_days=7, replay_days=60)
    assert pruned == retention.Pruned(60, 30 - unfolded)
    assert (count(store, Payload), unfolded) == (60, 3)
    with store.read() as session:
        left = Counter(id.rstrip("0123456789") for id in session.scalars(sa.select(Sample.request_id)))
    assert left == {"old": unfolded, "ahead": 30, "later": 30, "new": 30}
    with store.write() as session:
        session.execute(sa.update(Replay).values(folded_at=1.0))
    assert retention.prune(store, now=100 * DAY, payload_days=7, replay_days=60) == retention.Pruned(0, unfolded)


@pytest.mark.usefixtures("small_batches")
def test_intake_goes_on_while_old_samples_go(store: Store) -> None:
    add(store, "old", range(300), now=1.0)
    taken = threading.Event()

    def take() -> None:
        for number in range(20):
            add(store, "new", range(number, number + 1), now=100 * DAY)
        taken.set()

    intake = threading.Thread(target=take)
    intake.start()
    assert retention.prune(store, now=100 * DAY, payload_days=7, replay_days=60) == retention.Pruned(300, 300)
    intake.join(60)
    assert taken.is_set()
    assert count(store, Sample) == count(store, Payload) == 20


def test_two_workers_that_end_the_same_segments_never_wait_for_each_other_forever(store: Store) -> None:
    """Outcomes are counted in one order: else PostgreSQL ends one of the two as a deadlock."""
    for tenant in "abcdef":
        add(store, tenant, range(80))
    failures: list[Exception] = []

    def run(owner: str, backwards: bool) -> None:
        try:
            while tasks := lease(store, 12, owner):
                finish(store, sorted(tasks, key=lambda task: task.segment, reverse=backwards), owner)
        except Exception as error:
            failures.append(error)

    workers = [threading.Thread(target=run, args=(f"w{i}", i % 2 == 1)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert failures == []
    assert count(store, Replay) == count(store, Work, Work.state == "done") == 480
    with store.read() as session:
        ended = {row.segment: row.samples for row in session.scalars(sa.select(Outcome)) if row.outcome == "replayed"}
    assert ended == {f"tenant={tenant}": 80 for tenant in "abcdef"}


@pytest.fixture
def statements(store: Store) -> Iterator[list[str]]:
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        seen.append(statement)

    sa.event.listen(store.engine, "before_cursor_execute", note)
    yield seen
    sa.event.remove(store.engine, "before_cursor_execute", note)


def test_lists_read_no_payloads(store: Store, statements: list[str]) -> None:
    """Text and tokens lie in a table of their own, and nothing that lists, counts or draws ever looks there."""
    settings = Settings(control={"tick_s": 3600.0})
    with TestClient(create_app(store, settings)) as client:
        add(store, "a", range(20))
        finish(store, lease(store, 10))
        asked = [path for path in client.get("/openapi.json").json()["paths"] if "{" not in path]
        pages = ["/metrics", "/ui", "/v1/segments/tenant=a", *asked]
        statements.clear()
        answered = {path: client.get(path).status_code for path in pages}
    assert {"/v1/segments", "/v1/events", "/v1/deployments", "/metrics"} <= {
        path for path, status in answered.items() if status == 200
    }
    assert any("samples" in statement for statement in statements)
    assert [statement for statement in statements if "payloads" in statement] == []
