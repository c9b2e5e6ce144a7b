"""The store on a real SQLite and a real PostgreSQL: nothing acknowledged is lost, nothing is judged twice."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from driftwatch.errors import StoreError
from driftwatch.records import Record
from driftwatch.store import migrate, outbox, replays, retention, samples, work
from driftwatch.store.connection import Store, upsert
from driftwatch.store.schema import Base, Delivery, Deployment, Latency, Outcome, Payload, Replay, Sample, Work

DAY = 86_400.0
REPLAY = {
    "fingerprint": "f",
    "rule": "argmax",
    "split": "none",
    "tokens": 8,
    "depths": 1,
    "encoding": "bits",
    "weights": b"\xda",
    "proposals": None,
}


def record(number: int, **fields: Any) -> Record:
    ids = {"prompt_token_ids": [1, 2, 70_000], "output_token_ids": [3, 4, 5]}
    return Record(**({"id": f"r{number}", "labels": {"tenant": "a"}} | ids | fields))


def add(
    store: Store, records: Sequence[Record], *, now: float = 1.0, drafts: Sequence[str] = ("incumbent",), cap: int = 100
) -> samples.Stored:
    with store.write() as session:
        return samples.add(session, [(one, drafts) for one in records], now=now, max_segments=cap)


def lease(store: Store, owner: str = "w", *, now: float = 2.0, limit: int = 10) -> list[work.Task]:
    with store.write() as session:
        return work.lease(session, owner, now=now, lease_s=60, limit=limit)


def finish(store: Store, tasks: Sequence[work.Task], owner: str = "w") -> int:
    with store.write() as session:
        return work.complete(session, owner, [work.Verdict(task, replay=REPLAY) for task in tasks], now=3.0)


def count(store: Store, table: type[Base], *where: Any) -> int:
    with store.read() as session:
        return session.scalar(sa.select(sa.func.count()).select_from(table).where(*where)) or 0


def test_migrations_go_up_and_down_and_fit_the_schema(store_url: str) -> None:
    store = Store(store_url)
    assert migrate.problems(store) == ["at revision none, expected 0008: run `driftwatch db upgrade`"]
    migrate.upgrade(store)
    assert migrate.problems(store) == []
    migrate.downgrade(store, "base")
    with store.engine.connect() as connection:
        assert sa.inspect(connection).get_table_names() == ["alembic_version"]
    migrate.upgrade(store)
    assert migrate.problems(store) == []
    store.close()


def test_a_store_of_a_newer_version_is_left_alone(store: Store) -> None:
    with store.engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreError, match="revision 9999, newer than this version"):
        migrate.upgrade(store)


def test_a_store_that_is_not_migrated_says_what_to_do(store_url: str) -> None:
    store = Store(store_url)
    with pytest.raises(StoreError, match="run `driftwatch db upgrade`"), store.read() as session:
        session.scalar(sa.select(Sample.id))
    store.close()


@pytest.mark.parametrize("url", ["nonsense", "mysql://x", "sqlite:////no/such/folder/x.db"])
def test_an_unusable_url_is_one_line(url: str) -> None:
    with pytest.raises(StoreError) as caught:
        migrate.upgrade(Store(url))
    assert "\n" not in str(caught.value)


def test_each_record_is_stored_once(store: Store) -> None:
    assert add(store, [record(1), record(2), record(1)]) == samples.Stored(2, 1)
    assert add(store, [record(2), record(3)]) == samples.Stored(1, 1)
    assert (count(store, Sample), count(store, Payload), count(store, Work)) == (3, 3, 3)
    with store.read() as session:
        ended = {(row.segment, row.outcome): row.samples for row in session.scalars(sa.select(Outcome))}
    assert ended == {("tenant=a", "stored"): 3}


def test_rows_are_made_written_over_or_added_to(store: Store) -> None:
    keys = ["figure", "segment", "limit_s", "span_s", "number"]

    def row(number: int, weight: float) -> dict[str, Any]:
        key = dict(zip(keys, ("ttft", "tenant=a", 1.5, 60, number), strict=True))
        return key | {"weight": weight, "squares": 2.0 * weight, "over": 0.5}

    def held() -> list[tuple[float, float, float]]:
        columns = sa.select(Latency.weight, Latency.squares, Latency.over).order_by(Latency.number)
        with store.read() as session:
            return [(one.weight, one.squares, one.over) for one in session.execute(columns)]

    with store.write() as session:
        upsert(session, Latency, [row(1, 1.0)], keys, add=True)
        upsert(session, Latency, [row(1, 3.0), row(2, 5.0)], keys, add=True)
    assert held() == [(4.0, 8.0, 1.0), (5.0, 10.0, 0.5)]
    with store.write() as session:
        upsert(session, Latency, [row(2, 7.0), row(3, 9.0)], keys)
        upsert(session, Latency, [row(1, 2.0)], keys)
    assert held() == [(2.0, 4.0, 0.5), (7.0, 14.0, 0.5), (9.0, 18.0, 0.5)]


def test_a_large_batch_is_stored_whole(store: Store) -> None:
    assert add(store, [record(i) for i in range(1700)]) == samples.Stored(1700, 0)
    assert count(store, Work) == 1700


def test_tokens_and_facts_come_back_as_they_went_in(store: Store) -> None:
    add(store, [record(1, temperature=0.5, top_k=3, model="m", session="s", weight=2.5, seed=9)])
    (task,) = lease(store)
    assert (task.prompt_ids, task.output_ids, task.text) == ([1, 2, 70_000], [3, 4, 5], None)
    assert (task.model, task.temperature, task.top_p, task.top_k) == ("m", 0.5, None, 3)
    with store.read() as session:
        row = session.scalars(sa.select(Sample)).one()
    assert (row.session, row.weight, row.extra) == ("s", 2.5, {"seed": 9})


def test_segments_over_the_cap_are_other(store: Store) -> None:
    add(store, [record(i, labels={"tenant": f"t{i}"}) for i in range(5)], cap=3)
    add(store, [record(9, labels={"tenant": "t0"})], cap=3)
    with store.read() as session:
        found = list(session.scalars(sa.select(Sample.segment).order_by(Sample.id)))
    assert sorted(found[:5]) == ["other", "other", "tenant=t0", "tenant=t1", "tenant=t2"]
    assert found[5] == "tenant=t0"


def test_mining_samples_are_stored_but_never_judged(store: Store) -> None:
    add(store, [record(1, purpose="mining")])
    assert (count(store, Sample), count(store, Work)) == (1, 0)


def test_samples_over_the_days_budget_are_stored_but_not_judged(store: Store) -> None:
    def add_two(first: int, now: float) -> None:
        with store.write() as session:
            batch = [(record(first + i), ["incumbent", "candidate"]) for i in range(2)]
            samples.add(session, batch, now=now, max_segments=10, tokens_per_day=40)

    add_two(0, 1.0)
    assert count(store, Work) == 4, "2 samples of 6 tokens for 2 drafts: 24 of 40"
    add_two(2, 2.0)
    assert (count(store, Sample), count(store, Work)) == (4, 6)
    with store.read() as session:
        skipped = session.scalars(sa.select(Outcome).where(Outcome.reason == "over_budget")).one()
    assert (skipped.outcome, skipped.samples) == ("skipped", 1)
    add_two(4, DAY + 1.0)
    assert count(store, Work) == 10


def test_a_deployment_learns_facts_and_a_contradiction_makes_a_new_one(store: Store) -> None:
    add(store, [record(1, model="m", deployment={"engine": "vllm"})])
    add(store, [record(2, model="m", deployment={"engine": "vllm", "version": "1"})])
    add(store, [record(3, model="m", deployment={"version": "1"}), record(4, model="other")])
    add(store, [record(5, model="m", deployment={"engine": "vllm", "version": "2"})])
    with store.read() as session:
        facts = [row.facts for row in session.scalars(sa.select(Deployment).order_by(Deployment.id))]
    served = {"tokens": "served"}
    assert facts == [
        {"engine": "vllm", "version": "1"} | served,
        served,
        {"engine": "vllm", "version": "2"} | served,
    ]


def test_intakes_that_meet_a_new_deployment_at_once_make_one(store: Store) -> None:
    def take(number: int) -> None:
        add(store, [record(number, model="m", deployment={"version": "9"})])

    intakes = [threading.Thread(target=take, args=(i,)) for i in range(6)]
    for intake in intakes:
        intake.start()
    for intake in intakes:
        intake.join()
    assert (count(store, Sample), count(store, Deployment)) == (6, 1)


def test_retokenised_text_is_never_in_a_deployment_with_served_tokens(store: Store) -> None:
    text = Record(id="t", prompt="p", output="o", labels={"tenant": "a"})
    add(store, [record(1), text])
    with store.read() as session:
        rows = session.execute(sa.select(Sample.deployment_id, Sample.retokenised)).all()
    assert len({row.deployment_id for row in rows}) == 2


def test_completing_closes_work_and_stores_the_replay_once(store: Store) -> None:
    add(store, [record(i) for i in range(3)])
    tasks = lease(store)
    assert finish(store, tasks) == 3
    assert finish(store, tasks) == 0
    assert count(store, Replay) == 3
    assert lease(store) == []


def test_what_another_worker_took_over_is_left_to_it(store: Store) -> None:
    add(store, [record(1)])
    slow = lease(store, "slow", now=0.0)
    (taken,) = lease(store, "other", now=100.0)
    assert finish(store, slow, "slow") == 0
    assert finish(store, [taken], "other") == 1
    assert count(store, Replay) == 1


def test_renewed_leases_are_not_taken(store: Store) -> None:
    add(store, [record(1)])
    lease(store, "a", now=0.0)
    with store.write() as session:
        work.renew(session, "a", now=50.0, lease_s=60)
    assert lease(store, "b", now=100.0) == []
    assert len(lease(store, "b", now=111.0)) == 1


def test_a_sample_that_was_in_a_dead_batch_goes_alone_and_last(store: Store) -> None:
    add(store, [record(i) for i in range(3)])
    assert len(lease(store, "dead", now=0.0)) == 3
    add(store, [record(9)])
    assert [len(lease(store, f"w{i}", now=100.0)) for i in range(5)] == [1, 1, 1, 1, 0]
    with store.read() as session:
        attempts = list(session.scalars(sa.select(Work.attempts).order_by(Work.id)))
    assert attempts == [2, 2, 2, 1]


def test_after_three_attempts_alone_a_sample_fails_with_its_reason(store: Store) -> None:
    add(store, [record(1)])
    for attempt in range(4):
        assert len(lease(store, f"w{attempt}", now=100.0 * attempt)) == 1
    assert lease(store, "last", now=1000.0) == []
    with store.read() as session:
        row = session.scalars(sa.select(Work)).one()
        failed = session.scalars(sa.select(Outcome).where(Outcome.outcome == "failed")).one()
    assert (row.state, row.reason) == ("failed", "worker_died")
    assert (failed.samples, failed.reason) == (1, "worker_died")


def test_a_worker_that_stops_in_good_order_gives_its_work_back_untried(store: Store) -> None:
    add(store, [record(1)])
    lease(store, "a")
    with store.write() as session:
        work.release(session, "a")
    with store.read() as session:
        row = session.scalars(sa.select(Work)).one()
    assert (row.state, row.attempts, row.owner) == ("pending", 0, None)


def test_text_is_replaced_by_ids_and_forgotten(store: Store) -> None:
    add(store, [Record(id=f"t{i}", prompt="p", output="o") for i in range(2)])
    tokenised, untokenised = lease(store)
    with store.write() as session:
        verdicts = [
            work.Verdict(tokenised, replay=REPLAY, retokenised=([7], [8, 9])),
            work.Verdict(untokenised, skipped="no_tokenizer"),
        ]
        work.complete(session, "w", verdicts, now=3.0)
        assert work.forget_text(session) == 2
        assert work.forget_text(session) == 0
    with store.read() as session:
        (kept,) = session.scalars(sa.select(Payload))
    assert (kept.sample_id, kept.text, samples.unpack_ids(kept.output_ids or b"")) == (
        tokenised.sample_id,
        None,
        [8, 9],
    )


def test_text_that_waits_for_its_tokens_is_kept(store: Store) -> None:
    add(store, [Record(id="t", prompt="p", output="o")])
    with store.write() as session:
        assert work.forget_text(session) == 0


def test_replays_are_folded_by_mark(store: Store) -> None:
    add(store, [record(i) for i in range(3)])
    finish(store, lease(store))
    with store.write() as session:
        judged = replays.unfolded(session, 2)
        replays.mark_folded(session, [one.replay_id for one in judged], 4.0)
    assert [one.request_id for one in judged] == ["r0", "r1"]
    assert judged[0].weights.values[:, 0].tolist() == [1, 1, 0, 1, 1, 0, 1, 0]
    with store.write() as session:
        assert [one.request_id for one in replays.unfolded(session, 10)] == ["r2"]


def test_retention_keeps_what_is_not_folded(store: Store) -> None:
    add(store, [record(1), record(2)], now=0.0)
    add(store, [record(3)], now=50 * DAY)
    tasks = lease(store)
    finish(store, tasks[:1])
    pruned = retention.prune(store, now=100 * DAY, payload_days=60, replay_days=90)
    assert pruned == retention.Pruned(payloads=2, samples=1)
    with store.read() as session:
        assert set(session.scalars(sa.select(Sample.request_id))) == {"r1", "r3"}
    assert count(store, Work) == 2


def test_a_segment_without_samples_makes_room_for_another(store: Store) -> None:
    """Unfolded work keeps its samples, and they keep their segment."""
    add(store, [record(1, labels={"tenant": "gone"}), record(2, labels={"tenant": "busy"})], now=0.0, drafts=())
    add(store, [record(3, labels={"tenant": "waiting"})], now=0.0)
    finish(store, lease(store))
    add(store, [record(4, labels={"tenant": "busy"})], now=80 * DAY, drafts=(), cap=3)
    add(store, [record(5, labels={"tenant": "late"})], now=80 * DAY, drafts=(), cap=3)
    retention.prune(store, now=100 * DAY, payload_days=7, replay_days=90)
    add(store, [record(6, labels={"tenant": "late"})], now=100 * DAY, drafts=(), cap=3)
    add(store, [record(7, labels={"tenant": "later"})], now=100 * DAY, drafts=(), cap=3)
    with store.read() as session:
        held = {row.request_id: row.segment for row in session.execute(sa.select(Sample.request_id, Sample.segment))}
    assert held == {
        "r3": "tenant=waiting",
        "r4": "tenant=busy",
        "r5": "other",
        "r6": "tenant=late",
        "r7": "other",
    }


def test_unknown_fields_go_with_the_payload(store: Store) -> None:
    add(store, [record(1, raw_prompt="private")], now=0.0)
    add(store, [record(2, raw_prompt="private")], now=90 * DAY)
    retention.prune(store, now=91 * DAY, payload_days=7, replay_days=1000)
    with store.read() as session:
        kept = session.scalars(sa.select(Sample.extra).order_by(Sample.id)).all()
    assert kept == [None, {"raw_prompt": "private"}]


def test_the_outbox_keeps_each_endpoints_order(store: Store) -> None:
    with store.write() as session:
        for name in ("first", "second"):
            for _ in range(2):
                outbox.enqueue(session, name, "t", b"{}", ["a", "b"], now=1.0)
    assert count(store, Delivery) == 4
    with store.write() as session:
        due = outbox.due(session, 2.0)
        assert [(one.endpoint, one.event_id) for one in due] == [("a", "first"), ("b", "first")]
        due[0].state = "delivered"
        due[1].due_at = 100.0
    with store.read() as session:
        assert [(one.endpoint, one.event_id) for one in outbox.due(session, 2.0)] == [("a", "second")]
        assert outbox.counts(session) == {"delivered": 1, "pending": 3}


def write_many(url: str, first: int) -> None:
    store = Store(url)
    for i in range(40):
        add(store, [record(first + i), record(i)], now=float(i))
    store.close()


def test_three_writing_processes_lose_nothing(store_url: str) -> None:
    store = Store(store_url)
    migrate.upgrade(store)
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(store_url, 1000 * n)) for n in (1, 2, 3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert count(store, Sample) == 3 * 40 + 40
    with store.read() as session:
        assert session.scalar(sa.select(sa.func.sum(Outcome.samples))) == 160
    store.close()


def test_workers_side_by_side_never_hold_the_same_sample(store: Store) -> None:
    add(store, [record(i) for i in range(300)])
    taken: list[int] = []

    def drain(owner: str) -> None:
        while tasks := lease(store, owner, limit=7):
            taken.extend(task.sample_id for task in tasks)
            finish(store, tasks, owner)

    workers = [threading.Thread(target=drain, args=(f"w{i}",)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(taken) == sorted(set(taken))
    assert count(store, Replay) == 300


def test_a_locked_sqlite_file_is_a_store_error(sqlite_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driftwatch.store.connection.BUSY_SECONDS", 0.2)
    impatient = Store(sqlite_store.url.render_as_string())
    started = time.monotonic()
    with sqlite_store.write() as session:
        session.execute(sa.text("SELECT 1"))
        with pytest.raises(StoreError, match="database is locked"):
            add(impatient, [record(1)])
    assert time.monotonic() - started < 30
    assert add(impatient, [record(1)]) == samples.Stored(1, 0)
    impatient.close()
