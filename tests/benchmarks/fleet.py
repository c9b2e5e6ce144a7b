"""What a sample costs control, PostgreSQL and the shadow's bookkeeping: the unit costs of the sizing table.

``python -m tests.benchmarks.fleet``: a PostgreSQL of its own (with fsync), one control and workers as processes. Bodies
are as a tap's: NDJSON, up to 200 records, here of 1,000 prompt and 300 output tokens. A worker (``workers``) replays an
n-gram draft on short requests, so that the store is what is measured.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import httpx
import sqlalchemy as sa

from driftwatch.control import judge
from driftwatch.settings import load
from driftwatch.store.connection import Store
from driftwatch.store.schema import Work
from tests.benchmarks import workers
from tests.benchmarks.postgres import cpu_s, server
from tests.e2e.machine import Machine

BODIES, RECORDS, SENDERS = 20, 200, 8
TABLES = ("samples", "payloads", "work", "replays")
SEGMENTS = 20


def intake(machine: Machine, postgres: int) -> None:
    bodies = [workers.body(workers.records(i * RECORDS, RECORDS, 1000, 300)) for i in range(BODIES)]
    size = sum(len(one) for one in bodies)
    control = machine.processes["control"].pid
    waiting = list(bodies)

    def send() -> None:
        with httpx.Client(base_url=machine.control, timeout=120, trust_env=False) as client:
            while waiting:
                one = waiting.pop()
                while client.post("/v1/samples", content=one).status_code != 201:
                    time.sleep(0.2)

    before, begin = (cpu_s(control), cpu_s(postgres)), time.perf_counter()
    senders = [threading.Thread(target=send) for _ in range(SENDERS)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    seconds, count = time.perf_counter() - begin, BODIES * RECORDS
    spent = [1e3 * (now - then) / count for now, then in zip((cpu_s(control), cpu_s(postgres)), before, strict=True)]
    print(f"intake: {count:,} samples of {size / count:,.0f} B in {seconds:.1f} s: {count / seconds:,.0f} samples/s,")
    print(
        f"  {size / seconds / 1e6:.1f} MB/s; CPU a sample: control {spent[0]:.2f} ms, PostgreSQL {spent[1]:.2f} ms",
        flush=True,
    )


def sizes(store: Store, count: int) -> None:
    with store.read() as session:
        found = [session.scalar(sa.select(sa.func.pg_total_relation_size(name))) or 0 for name in TABLES]
    each = ", ".join(f"{name} {size / count:,.0f} B" for name, size in zip(TABLES, found, strict=True))
    print(f"stored with indexes, a sample: {each}")


def fold(machine: Machine, store: Store) -> None:
    begin = time.process_time(), time.perf_counter()
    folded = judge.fold(store, load(machine.config), time.time())
    cpu, seconds = time.process_time() - begin[0], time.perf_counter() - begin[1]
    print(f"folding: {folded:,} in {seconds:.1f} s, {1e3 * cpu / folded:.2f} ms CPU of control each", flush=True)


def main() -> None:
    with server() as (url, postgres), tempfile.TemporaryDirectory() as folder:
        draft = {"name": "incumbent", "path": "ngram:min=1,max=3"}
        models = [{"name": "*", "drafts": [draft], "gamma": 5}]
        machine = Machine(Path(folder), store={"url": url}, models=models)
        machine.config.write_text(machine.config.read_text().replace("tick_s: 0.3", "tick_s: 3600"))
        try:
            machine.start_control()
            store = Store(url)
            intake(machine, postgres)
            sizes(store, BODIES * RECORDS)
            with store.write() as session:
                session.execute(sa.update(Work).values(state="done"))
            workers.queue(machine, store)
            workers.run(machine, store, 1, postgres)
            fold(machine, store)
            store.close()
        finally:
            machine.stop()


if __name__ == "__main__":
    main()
