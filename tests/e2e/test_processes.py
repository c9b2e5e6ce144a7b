"""Whole processes: the loop's counts are an engine's, and no fault behind the tap costs a request or a sample."""

from __future__ import annotations

import json
import signal
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.machine import TRACE, Machine, completion, prompts, until


def send(machine: Machine, records: list[dict[str, Any]], *, stream: bool = False, tenant: str = "a") -> None:
    with httpx.Client(base_url=machine.tap, timeout=60, trust_env=False) as client:
        for record in records:
            body = completion(record, stream=stream)
            answer = client.post("/v1/completions", json=body, headers={"x-tenant": tenant})
            assert answer.status_code == 200, answer.text


def test_counts_at_the_end_are_the_engines_own(machine: Machine) -> None:
    """Client, tap, control, shadow, metrics: the windows of 72 requests come out as the real engine counted them."""
    records = prompts()
    machine.start_engine()
    machine.start("serve")
    machine.wait_for(f"{machine.admin}/readyz")
    machine.wait_for(f"{machine.control}/readyz")
    machine.wait_for_engine("serve")
    send(machine, records[:36], stream=True, tenant="streaming")
    send(machine, records[36:], tenant="whole")
    until(lambda: machine.judged() == len(records))
    found = until(lambda: (m := machine.metrics()).get("driftwatch_shadow_requests_total") == len(records) and m)
    assert found["driftwatch_shadow_tokens_total"] == sum(len(one["output_token_ids"]) - 1 for one in records)
    windows = sum(one["engine"]["windows"] for one in records)
    accepted = sum(one["engine"]["accepted"] for one in records)
    assert found["driftwatch_shadow_windows_total"] == pytest.approx(windows, rel=0.005)
    assert found["driftwatch_shadow_accepted_tokens_total"] == pytest.approx(accepted, rel=0.02)
    assert machine.metrics(machine.admin)["driftwatch_requests_total"] == len(records)
    deployments = httpx.get(f"{machine.control}/v1/deployments").json()["deployments"]
    assert {one["facts"]["tokens"] for one in deployments} == {"served"}, "exact token ids were asked for and stripped"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_sees_the_engines_answer_without_what_was_asked_for_it(machine: Machine, stream: bool) -> None:
    machine.start_engine()
    machine.start_control()
    machine.start_tap()
    body = completion(prompts()[0], stream=stream)
    through = httpx.post(f"{machine.tap}/v1/completions", json=body, timeout=30)
    direct = httpx.post(f"{machine.engine}/v1/completions", json=body, timeout=30)
    assert '"token_ids":[' not in through.text.replace(" ", "")
    assert events(through.text) == events(direct.text)


def events(text: str) -> list[Any]:
    if not text.startswith("data:"):
        return [json.loads(text)]
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@contextmanager
def traffic(machine: Machine) -> Iterator[list[int]]:
    """Requests through the tap in the background; the list gets each one's status."""
    statuses: list[int] = []
    over = threading.Event()
    records = prompts()

    def run() -> None:
        with httpx.Client(base_url=machine.tap, timeout=60, trust_env=False) as client:
            i = 0
            while not over.is_set():
                i += 1
                try:
                    body = completion(records[i % len(records)], stream=i % 2 == 0)
                    statuses.append(client.post("/v1/completions", json=body).status_code)
                except httpx.HTTPError:
                    statuses.append(0)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    yield statuses
    over.set()
    for thread in threads:
        thread.join()


def assert_no_request_is_lost(statuses: list[int], more: int = 100) -> None:
    already = len(statuses)
    until(lambda: len(statuses) >= already + more)
    assert set(statuses) == {200}


def test_no_request_is_lost_while_control_and_shadow_die_and_come_back(machine: Machine) -> None:
    machine.start_engine()
    machine.start_control()
    machine.start("shadow")
    machine.start_tap()
    with traffic(machine) as statuses:
        assert_no_request_is_lost(statuses)
        machine.kill("shadow")
        machine.kill("control")
        assert_no_request_is_lost(statuses, 300)
        machine.start_control()
        machine.start("shadow")
        assert_no_request_is_lost(statuses)
        machine.kill("control", signal.SIGSTOP)
        assert_no_request_is_lost(statuses, 300)
        machine.processes["control"].send_signal(signal.SIGCONT)
    until(lambda: machine.judged() > 0)


def test_no_request_is_lost_while_the_stores_file_is_locked(machine: Machine) -> None:
    machine.start_engine()
    machine.start_control()
    machine.start_tap()
    with traffic(machine) as statuses:
        assert_no_request_is_lost(statuses)
        lock = sqlite3.connect(machine.folder / "driftwatch.db", isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")
        refused = httpx.post(f"{machine.control}/v1/samples", content=TRACE.read_bytes().splitlines()[0], timeout=60)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "store_unavailable"
        assert_no_request_is_lost(statuses)
        lock.execute("ROLLBACK")
        lock.close()
        assert_no_request_is_lost(statuses)
    until(lambda: machine.metrics().get("driftwatch_samples_total", 0) > 50)


def test_no_request_is_lost_while_the_disk_is_full(machine: Machine) -> None:
    """For control the disk ends at a file size of 1 MB: the store's writes fail as on a full disk."""
    machine.start_engine()
    machine.start_control(prefix=("prlimit", "--fsize=1000000"))
    machine.start_tap()
    records = [json.dumps(one | {"id": f"r{i}"}) for i, one in enumerate(prompts() * 20)]
    acknowledged = 0
    with traffic(machine) as statuses:
        refused = None
        for first in range(0, len(records), 50):
            body = "\n".join(records[first : first + 50])
            answer = httpx.post(f"{machine.control}/v1/samples", content=body, timeout=60)
            if answer.status_code != 201:
                refused = answer
                break
            acknowledged += answer.json()["stored"]
        assert refused is not None
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "store_unavailable"
        assert_no_request_is_lost(statuses)
        assert httpx.get(f"{machine.control}/healthz").status_code == 200
    machine.kill("control")
    with sqlite3.connect(machine.folder / "driftwatch.db") as store:
        stored = store.execute("SELECT count(*) FROM samples WHERE request_id LIKE 'r%'").fetchone()[0]
    assert stored == acknowledged > 0


@pytest.mark.timeout(900)
def test_each_acknowledged_sample_is_judged_once_though_the_shadow_is_killed_20_times(machine: Machine) -> None:
    """SIGKILL each time that a lease is held: in the middle of a batch."""
    machine.start_control()
    base = prompts()
    records = []
    for i in range(1500):
        one, other = base[i % len(base)], base[(7 * i + 1) % len(base)]
        output = (one["output_token_ids"] + other["output_token_ids"]) * 5
        records.append({"id": f"r{i}", "prompt_token_ids": one["prompt_token_ids"], "output_token_ids": output})
    stored = 0
    for first in range(0, len(records), 250):
        body = "\n".join(json.dumps(one) for one in records[first : first + 250])
        stored += httpx.post(f"{machine.control}/v1/samples", content=body, timeout=60).json()["stored"]
    assert stored == len(records)
    store = sqlite3.connect(f"file:{machine.folder / 'driftwatch.db'}?mode=ro", uri=True, isolation_level=None)

    def leased_by(owner: str) -> bool:
        query = "SELECT count(*) FROM work WHERE state = 'leased' AND owner LIKE ?"
        return bool(store.execute(query, (f"%:{owner}:%",)).fetchone()[0])

    killed_in_a_batch = 0
    for _ in range(20):
        process = machine.start("shadow")
        until(lambda pid=process.pid: leased_by(str(pid)), every=0.002)  # type: ignore[misc]
        killed_in_a_batch += 1
        machine.kill("shadow")
    machine.start("shadow")
    until(lambda: machine.judged() == len(records), 240)
    until(lambda: machine.metrics()["driftwatch_shadow_requests_total"] == len(records))
    assert killed_in_a_batch == 20
    replays, distinct = store.execute("SELECT count(*), count(DISTINCT sample_id) FROM replays").fetchone()
    states = dict(store.execute("SELECT state, count(*) FROM work GROUP BY state").fetchall())
    tokens = machine.metrics()["driftwatch_shadow_tokens_total"]
    store.close()
    assert (replays, distinct) == (len(records), len(records))
    assert states == {"done": len(records)}
    assert tokens == sum(len(one["output_token_ids"]) - 1 for one in records)


def test_sigterm_ends_each_process_in_order(machine: Machine) -> None:
    machine.start_engine()
    machine.start("serve")
    machine.wait_for(f"{machine.admin}/readyz")
    machine.wait_for(f"{machine.control}/readyz")
    send(machine, prompts()[:5])
    process = machine.processes.pop("serve")
    process.terminate()
    assert process.wait(60) == 0
    for url in (machine.tap, machine.control, machine.admin):
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
    with sqlite3.connect(machine.folder / "driftwatch.db") as store:
        assert store.execute("SELECT count(*) FROM samples").fetchone()[0] == 5, "the open window reached control"


def test_an_unreadable_draft_leaves_the_rest_working(tmp_path: Path) -> None:
    machine = Machine(tmp_path, models=[{"name": "*", "drafts": [{"name": "incumbent", "path": str(tmp_path)}]}])
    try:
        machine.start_engine()
        machine.start("serve")
        machine.wait_for(f"{machine.admin}/readyz")
        machine.wait_for(f"{machine.control}/readyz")
        send(machine, prompts()[:3])
        until(lambda: machine.metrics().get("driftwatch_samples_total") == 3)
        message = f"driftwatch: draft {tmp_path}: config.json: No such file or directory"
        until(lambda: message in machine.log("serve"))
        assert "Traceback" not in machine.log("serve")
    finally:
        machine.stop()
