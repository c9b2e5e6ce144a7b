"""What a sample costs control, PostgreSQL and the shadow's bookkeeping: the unit costs of the sizing table.

``python -m tests.benchmarks.fleet``: a PostgreSQL of its own (with fsync), one control and workers as processes. Bodies
are as a tap's: NDJSON, up to 200 records, here of 1,000 prompt and 300 output tokens. Workers replay an n-gram draft on
short requests, so that the store is what is measured.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import sqlalchemy as sa

from driftwatch.control import judge
from driftwatch.settings import load
from driftwatch.store.connection import Store
from driftwatch.store.schema import Outcome, Replay, Work
from tests.benchmarks.postgres import server
from tests.e2e.machine import Machine, free_port, until

BODIES, RECORDS, SENDERS = 20, 200, 8
SHORT = 2000
TABLES = ("samples", "payloads", "work", "replays")
SEGMENTS = 20


def records(first: int, count: int, prompt: int, output: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(first)
    drafted = {"windows": output // 3, "drafted": output, "accepted": output // 2}
    return [
        {
            "id": f"{first + i:012d}-4f1c-a0c3",
            "model": "m",
            "labels": {"tenant": f"t{i % SEGMENTS}"},
            "deployment": {"engine": "vllm", "version": "0.32.0"},
            "temperature": 0.7,
            "weight": 12.5,
            "timing": {"ttft_s": 0.21, "tpot_s": 0.012, "e2e_s": 4.2},
            "engine": drafted,
            "prompt_token_ids": rng.integers(0, 128_000, prompt).tolist(),
            "output_token_ids": rng.integers(0, 128_000, output).tolist(),
        }
        for i in range(count)
    ]


def body(found: list[dict[str, Any]]) -> bytes:
    return b"\n".join(json.dumps(one).encode() for one in found)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, its children and those that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = sum(int(value) for value in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(cpu_s(int(child)) for child in children if Path(f"/proc/{child}").exists())


def intake(machine: Machine, postgres: int) -> None:
    bodies = [body(records(i * RECORDS, RECORDS, 1000, 300)) for i in range(BODIES)]
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


def _answers(address: str) -> bool:
    try:
        return httpx.get(address, timeout=5, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def workers(machine: Machine, store: Store, count: int, runs: int, postgres: int) -> None:
    """All of the short work, from when it appears to when it is done, by workers that wait for it."""
    names, addresses = [f"shadow{i}" for i in range(count)], []
    for name in names:
        port = free_port()
        os.environ["DRIFTWATCH_SHADOW__LISTEN"] = f"127.0.0.1:{port}"
        machine.start(name, sys.executable, "-m", "driftwatch", "shadow", "--config", str(machine.config))
        addresses.append(f"http://127.0.0.1:{port}/healthz")
    for address in addresses:
        until(partial(_answers, address), 300)
    with store.write() as session:
        session.execute(sa.delete(Replay))
        fresh = {"state": "pending", "attempts": 0}
        session.execute(sa.update(Work).where(Work.reason == "short").values(fresh))
    begin, before = time.perf_counter(), cpu_s(postgres)
    open_work = sa.select(sa.func.count()).select_from(Work).where(Work.state.in_(("pending", "leased")))

    def done() -> bool:
        with store.read() as session:
            return session.scalar(open_work) == 0

    until(done, 300)
    seconds = time.perf_counter() - begin
    spent = 1e3 * (cpu_s(postgres) - before) / SHORT
    for name in names:
        machine.kill(name)
    with store.read() as session:
        judged = session.scalar(sa.select(sa.func.count()).select_from(Replay))
        counted = session.scalar(sa.select(sa.func.sum(Outcome.samples)).where(Outcome.outcome == "replayed"))
    assert judged == SHORT, judged
    assert counted == SHORT * runs, "each once"
    with store.write() as session:
        session.execute(sa.update(Work).where(Work.state == "done", Work.reason.is_(None)).values(reason="short"))
    print(f"{count} workers: {SHORT / seconds:,.0f} replays/s; PostgreSQL {spent:.2f} ms CPU a replay", flush=True)


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
                session.execute(sa.update(Work).values(state="done", reason="long"))
            for first in range(0, SHORT, RECORDS):
                short = body(records(10_000_000 + first, RECORDS, 40, 40))
                httpx.post(
                    f"{machine.control}/v1/samples", content=short, timeout=60, trust_env=False
                ).raise_for_status()
            with store.write() as session:
                session.execute(sa.update(Work).where(Work.state == "pending").values(state="done", reason="short"))
            for runs, count in enumerate((1, 2, 4), 1):
                workers(machine, store, count, runs, postgres)
                if runs == 1:
                    fold(machine, store)
            store.close()
        finally:
            machine.stop()


if __name__ == "__main__":
    main()
