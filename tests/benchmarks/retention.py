"""Pruning a large store while samples come in: how long one transaction is, and what that does to who writes meanwhile.

``python -m tests.benchmarks.retention [--samples N] [--minutes M]``: a PostgreSQL of its own, N samples with payload,
work and replay, all past their days; then one intake of 20 records after another, first alone, then beside the pruning,
which is stopped after M minutes. The tables are as in use; only tokens are few, which cost bytes and no rows.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import sqlalchemy as sa

from driftwatch.records import Record
from driftwatch.store import migrate, retention, samples
from driftwatch.store.connection import Store
from tests.benchmarks.postgres import server

PIECE = 100_000
ALONE_S = 10.0
SAID = 7 / 97
"""Share of the samples, the newest, that still have a payload: it is kept for 7 days, and samples for 90."""

FILL = """
WITH new AS (
  INSERT INTO samples (request_id, deployment_id, segment, purpose, weight, arrived_at, served_at, session, labels,
                       tokens, retokenised, temperature, timing, engine, live_folded_at)
  SELECT 'old-' || i, 1, 'tenant=' || i % 20, 'estimate', 12.5, i * 0.5, i * 0.5, NULL,
         jsonb_build_object('tenant', i % 20), 32, false, 0.7, '{"ttft_s": 0.21, "tpot_s": 0.012, "e2e_s": 4.2}',
         '{"windows": 100, "drafted": 300, "accepted": 150}', 1
  FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) AS i RETURNING id, arrived_at
), said AS (
  INSERT INTO payloads (sample_id, prompt_ids, output_ids)
  SELECT id, decode(repeat('61f10000', 24), 'hex'), decode(repeat('61f10000', 8), 'hex') FROM new
  WHERE arrived_at >= :said
), closed AS (
  INSERT INTO work (sample_id, draft, state, attempts, queued_at, turn)
  SELECT id, 'incumbent', 'done', 1, arrived_at, 0 FROM new
)
INSERT INTO replays (sample_id, draft, fingerprint, rule, split, tokens, depths, encoding, weights, replayed_at,
                     folded_at)
SELECT id, 'incumbent', repeat('f', 64), 'argmax', 'none', 7, 8, 'bits', decode(repeat('5a', 7), 'hex'), arrived_at, 1
FROM new
"""


def fill(store: Store, count: int) -> None:
    with store.engine.begin() as connection:
        connection.execute(
            sa.text("INSERT INTO deployments (model, facts, first_seen, last_seen) VALUES ('m', '{}', 0, 0)")
        )
    said = 0.5 * count * (1 - SAID)
    for first in range(0, count, PIECE):
        with store.engine.begin() as connection:
            # What is made here is consistent: no key needs to be looked up.
            connection.execute(
                sa.text("SET LOCAL synchronous_commit = off; SET LOCAL session_replication_role = replica")
            )
            connection.execute(sa.text(FILL), {"first": first, "last": min(first + PIECE, count) - 1, "said": said})
    with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text("VACUUM ANALYZE"))


class Intake(threading.Thread):
    """Takes records in until told to stop; how long each transaction took."""

    numbers = itertools.count()

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._over = threading.Event()
        self.seconds: list[float] = []

    def run(self) -> None:
        ids: dict[str, Any] = {"prompt_token_ids": [7] * 300, "output_token_ids": [9] * 100, "labels": {"tenant": "1"}}
        while not self._over.wait(0.01):
            records = [Record(id=f"new-{next(self.numbers)}", **ids) for _ in range(20)]
            begin = time.perf_counter()
            with self._store.write() as session:
                samples.add(session, [(one, ["incumbent"]) for one in records], now=time.time(), max_segments=100)
            self.seconds.append(time.perf_counter() - begin)

    def stop(self) -> str:
        self._over.set()
        self.join()
        p50, p99 = np.quantile(self.seconds, (0.5, 0.99))
        return f"{len(self.seconds)} intakes, p50 {p50:.3f} s, p99 {p99:.3f} s, longest {max(self.seconds):.3f} s"


class Over(Exception):
    """The time for pruning is up."""


class Clock:
    """Durations of all statements and transactions of one store; ends the pruning between two of them."""

    def __init__(self, store: Store, seconds: float) -> None:
        self.statements: list[tuple[float, str]] = []
        self.transactions: list[float] = []
        begun: dict[str, float] = {}
        over = time.perf_counter() + seconds

        @sa.event.listens_for(store.engine, "begin")
        def _begin(_connection: Any) -> None:
            begun["transaction"] = time.perf_counter()
            if begun["transaction"] > over:
                raise Over

        @sa.event.listens_for(store.engine, "commit")
        def _commit(_connection: Any) -> None:
            self.transactions.append(time.perf_counter() - begun["transaction"])

        @sa.event.listens_for(store.engine, "before_cursor_execute")
        def _before(*_arguments: Any) -> None:
            begun["statement"] = time.perf_counter()

        @sa.event.listens_for(store.engine, "after_cursor_execute")
        def _after(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
            self.statements.append((time.perf_counter() - begun["statement"], " ".join(statement.split())[:60]))


def measured(store: Store, other: Store, seconds: float) -> None:
    """Prune, and tell what that took and what it did to the intake beside it."""
    alone = Intake(other)
    alone.start()
    time.sleep(ALONE_S)
    print("alone:", alone.stop(), flush=True)
    counts = "SELECT (SELECT count(*) FROM payloads), (SELECT count(*) FROM samples), pg_current_wal_lsn() - '0/0'"
    with other.read() as session:
        before = session.execute(sa.text(counts)).one()
    clock, beside, taken = Clock(store, seconds), Intake(other), next(Intake.numbers)
    beside.start()
    begin = time.perf_counter()
    with suppress(Over):
        retention.prune(store, now=time.time(), payload_days=7, replay_days=90)
    took = time.perf_counter() - begin
    print("beside the pruning:", beside.stop(), flush=True)
    new = next(Intake.numbers) - taken - 1
    with other.read() as session:
        payloads, samples_, wal = (
            now - then for now, then in zip(session.execute(sa.text(counts)).one(), before, strict=True)
        )
    payloads, samples_ = new - payloads, new - samples_
    rate = (payloads + samples_) / took
    print(f"deleted {payloads:,} payloads and {samples_:,} samples in {took:.0f} s: {rate:,.0f} a second")
    print(f"log: {wal / (payloads + samples_):,.0f} bytes each, that of the intake among it")
    longest = np.quantile(clock.transactions, (0.5, 0.99, 1.0))
    print("transactions of the pruning: p50 {:.3f} s, p99 {:.3f} s, longest {:.3f} s".format(*longest))
    for duration, statement in sorted(clock.statements, reverse=True)[:3]:
        print(f"  {duration:.3f} s: {statement}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    with server() as (url, _):
        store, other = Store(url), Store(url)
        migrate.upgrade(store)
        begin = time.perf_counter()
        fill(store, options.samples)
        with store.read() as session:
            size = session.scalar(sa.text("SELECT pg_database_size(current_database())")) or 0
        print(
            f"{options.samples:,} samples, {size / 1e9:.2f} GB, filled in {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
        measured(store, other, 60.0 * options.minutes)
        store.close()
        other.close()


if __name__ == "__main__":
    main()
