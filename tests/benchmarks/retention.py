"""Pruning a large store while samples come in: how long one transaction is, and what that does to who writes meanwhile.

``python -m tests.benchmarks.retention [--samples N]``: a PostgreSQL of its own, N samples with payload, work and
replay, all past their days; then one intake of 20 records after another, first alone, then beside the pruning.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from typing import Any

import numpy as np
import sqlalchemy as sa

from driftwatch.records import Record
from driftwatch.store import migrate, retention, samples
from driftwatch.store.connection import Store
from tests.benchmarks.postgres import server

DAY = 86_400.0
PIECE = 100_000
ALONE_S = 10.0

FILL = """
WITH new AS (
  INSERT INTO samples (request_id, deployment_id, segment, purpose, weight, arrived_at, served_at, session, labels,
                       tokens, retokenised, engine, extra)
  SELECT 'old-' || i, 1, 'tenant=' || i % 20, 'estimate', 12.5, i * 60.0, i * 60.0, NULL, '{"tenant": "a"}',
         400, false, NULL, NULL
  FROM generate_series(:first, :last) AS i RETURNING id, arrived_at
), said AS (
  INSERT INTO payloads (sample_id, prompt_ids, output_ids)
  SELECT id, decode(repeat('61f10000', 300), 'hex'), decode(repeat('61f10000', 100), 'hex') FROM new
), closed AS (
  INSERT INTO work (sample_id, draft, state, attempts, queued_at, turn)
  SELECT id, 'incumbent', 'done', 1, arrived_at, 0 FROM new
)
INSERT INTO replays (sample_id, draft, fingerprint, rule, split, tokens, depths, encoding, weights, replayed_at,
                     folded_at)
SELECT id, 'incumbent', repeat('f', 64), 'argmax', 'none', 99, 8, 'bits', decode(repeat('5a', 99), 'hex'), arrived_at, 1
FROM new
"""


def fill(store: Store, count: int) -> None:
    with store.engine.begin() as connection:
        connection.execute(
            sa.text("INSERT INTO deployments (model, facts, first_seen, last_seen) VALUES ('m', '{}', 0, 0)")
        )
    for first in range(0, count, PIECE):
        with store.engine.begin() as connection:
            connection.execute(sa.text("SET LOCAL synchronous_commit = off"))
            connection.execute(sa.text(FILL), {"first": first, "last": min(first + PIECE, count) - 1})
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


class Clock:
    """Durations of all statements and transactions of one store."""

    def __init__(self, store: Store) -> None:
        self.statements: list[tuple[float, str]] = []
        self.transactions: list[float] = []
        begun: dict[str, float] = {}

        @sa.event.listens_for(store.engine, "begin")
        def _begin(_connection: Any) -> None:
            begun["transaction"] = time.perf_counter()

        @sa.event.listens_for(store.engine, "commit")
        def _commit(_connection: Any) -> None:
            self.transactions.append(time.perf_counter() - begun["transaction"])

        @sa.event.listens_for(store.engine, "before_cursor_execute")
        def _before(*_arguments: Any) -> None:
            begun["statement"] = time.perf_counter()

        @sa.event.listens_for(store.engine, "after_cursor_execute")
        def _after(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
            self.statements.append((time.perf_counter() - begun["statement"], " ".join(statement.split())[:60]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    count = parser.parse_args().samples
    with server() as (url, _):
        store, other = Store(url), Store(url)
        migrate.upgrade(store)
        begin = time.perf_counter()
        fill(store, count)
        with store.read() as session:
            size = session.scalar(sa.text("SELECT pg_database_size(current_database())")) or 0
        print(f"{count:,} samples, {size / 1e9:.2f} GB, filled in {time.perf_counter() - begin:.0f} s", flush=True)
        alone = Intake(other)
        alone.start()
        time.sleep(ALONE_S)
        print("alone:", alone.stop(), flush=True)
        clock = Clock(store)
        beside = Intake(other)
        beside.start()
        begin = time.perf_counter()
        pruned = retention.prune(store, now=time.time(), payload_days=7, replay_days=90)
        seconds = time.perf_counter() - begin
        print("beside the pruning:", beside.stop(), flush=True)
        assert pruned == retention.Pruned(count, count), pruned
        longest = np.quantile(clock.transactions, (0.5, 0.99, 1.0))
        print(f"{pruned} in {seconds:.0f} s: {count / seconds:,.0f} samples with all of theirs a second")
        print("transactions of the pruning: p50 {:.3f} s, p99 {:.3f} s, longest {:.3f} s".format(*longest))
        for duration, statement in sorted(clock.statements, reverse=True)[:3]:
            print(f"  {duration:.3f} s: {statement}")
        store.close()
        other.close()


if __name__ == "__main__":
    main()
