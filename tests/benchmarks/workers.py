"""Shadow workers on one PostgreSQL: what 1, 2 and 4 of them judge a second, and what a replay costs each side.

``python -m tests.benchmarks.workers``: a PostgreSQL of its own (with fsync), one control and workers as processes, each
with one thread; short requests of 20 segments. With an n-gram draft nearly all is to lease and hand in; the chain draft
of the tests is replayed with torch. Efficiency is the rate over as many times that of one worker: on C cores it cannot
stay at 1 for more than C workers, PostgreSQL among them. CPU a replay tells contention from a lack of cores.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import sqlalchemy as sa

from driftwatch.store.connection import Store
from driftwatch.store.schema import Outcome, Replay, Sample, Work
from tests.benchmarks.postgres import cpu_s, server
from tests.e2e.machine import CHAIN, Machine, free_port, until

SHORT, RECORDS = 2000, 200
SEGMENTS = 20
VOCABULARY = 2048
"""Of the chain draft."""
DRAFTS = {"n-gram": "ngram:min=1,max=3", "chain": str(CHAIN)}
OPEN = Work.state.in_(("pending", "leased"))
LONG = 40
"""Tokens of a prompt, and of an output."""
MINE = Work.sample_id.in_(sa.select(Sample.id).where(Sample.tokens == 2 * LONG))


def records(first: int, count: int, prompt: int, output: int, vocabulary: int = 128_000) -> list[dict[str, Any]]:
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
            "prompt_token_ids": rng.integers(0, vocabulary, prompt).tolist(),
            "output_token_ids": rng.integers(0, vocabulary, output).tolist(),
        }
        for i in range(count)
    ]


def body(found: list[dict[str, Any]]) -> bytes:
    return b"\n".join(json.dumps(one).encode() for one in found)


def queue(machine: Machine, store: Store) -> None:
    """Short requests, whose work waits for ``run``."""
    for first in range(0, SHORT, RECORDS):
        short = body(records(10_000_000 + first, RECORDS, LONG, LONG, VOCABULARY))
        httpx.post(f"{machine.control}/v1/samples", content=short, timeout=60, trust_env=False).raise_for_status()
    with store.write() as session:
        session.execute(sa.update(Work).where(OPEN).values(state="done"))


def _answers(address: str) -> bool:
    try:
        return httpx.get(address, timeout=5, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def run(machine: Machine, store: Store, count: int, postgres: int) -> float:
    """All of the short work, from when it appears to when it is done, by workers that wait for it; replays a second."""
    names, addresses = [f"shadow{i}" for i in range(count)], []
    for name in names:
        port = free_port()
        os.environ["DRIFTWATCH_SHADOW__LISTEN"] = f"127.0.0.1:{port}"
        machine.start(name, sys.executable, "-m", "driftwatch", "shadow", "--config", str(machine.config))
        addresses.append(f"http://127.0.0.1:{port}/healthz")
    for address in addresses:
        until(partial(_answers, address), 300)
    replayed = sa.select(sa.func.sum(Outcome.samples)).where(Outcome.outcome == "replayed")
    with store.write() as session:
        earlier = session.scalar(replayed) or 0
        session.execute(sa.delete(Replay))
        session.execute(sa.update(Work).where(MINE).values(state="pending", attempts=0))
    pids = [postgres, *(machine.processes[name].pid for name in names)]
    begin, before = time.perf_counter(), [cpu_s(pid) for pid in pids]

    def done() -> bool:
        with store.read() as session:
            return session.scalar(sa.select(sa.func.count()).select_from(Work).where(OPEN)) == 0

    until(done, 300)
    seconds = time.perf_counter() - begin
    spent = [1e3 * (cpu_s(pid) - then) / SHORT for pid, then in zip(pids, before, strict=True)]
    for name in names:
        machine.kill(name)
    with store.read() as session:
        judged = session.scalar(sa.select(sa.func.count()).select_from(Replay))
        counted = session.scalar(replayed)
    assert (judged, counted) == (SHORT, earlier + SHORT), "each once"
    print(
        f"{count} workers: {SHORT / seconds:,.0f} replays/s; CPU a replay: workers {sum(spent[1:]):.2f} ms,"
        f" PostgreSQL {spent[0]:.2f} ms",
        flush=True,
    )
    return SHORT / seconds


def main() -> None:
    for kind, path in DRAFTS.items():
        print(kind, flush=True)
        with server() as (url, postgres), tempfile.TemporaryDirectory() as folder:
            models = [{"name": "*", "drafts": [{"name": "incumbent", "path": path}], "gamma": 5}]
            machine = Machine(Path(folder), store={"url": url}, models=models)
            machine.config.write_text(machine.config.read_text().replace("tick_s: 0.3", "tick_s: 3600"))
            try:
                machine.start_control()
                store = Store(url)
                queue(machine, store)
                rates = {count: run(machine, store, count, postgres) for count in (1, 2, 4)}
                told = [f"{count}: {rate / count / rates[1]:.2f}" for count, rate in rates.items()]
                print(f"efficiency: {', '.join(told)}", flush=True)
                store.close()
            finally:
                machine.stop()


if __name__ == "__main__":
    main()
