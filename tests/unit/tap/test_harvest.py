from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from driftwatch.tap import harvest as module
from driftwatch.tap.harvest import Harvest
from driftwatch.tap.metrics import Metrics
from driftwatch.tap.sampler import Room, Sampler
from driftwatch.tap.shipper import Line, Shipper
from driftwatch.wire.exchange import Exchange

ROOM = Room(2)


class Bench:
    def __init__(self, room: Room = ROOM) -> None:
        self.metrics = Metrics()
        self.sampler = Sampler[Exchange](lambda _segment: room, 0.05)
        self.lines: list[dict[str, Any]] = []
        shipper = Shipper("http://127.0.0.1:9", queue=10, token=None, metrics=self.metrics)
        shipper.put = self._put  # type: ignore[method-assign]
        self.harvest = Harvest(self.sampler, shipper, self.metrics)

    def _put(self, line: Line) -> None:
        self.lines.append(json.loads(line.data))

    def add(self, id: str, output: str = "hello", *, no_train: bool = False) -> None:
        message = {"choices": [{"message": {"content": output}, "finish_reason": "stop"}]}
        exchange = Exchange(
            id=id,
            path="/v1/chat/completions",
            request=b'{"messages": [{"role": "user", "content": "hi"}]}',
            status=200,
            headers={"content-type": "application/json"},
            response=json.dumps(message).encode(),
            no_train=no_train,
        )
        self.sampler.add("all", self.sampler.ticket("all", 0.0), exchange, 0.0)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"driftwatch_{name}", labels) or 0.0


async def test_kept_exchanges_become_records_with_their_weight() -> None:
    bench = Bench()
    for number in range(5):
        bench.add(f"r{number}")
    await bench.harvest.flush()
    assert [line["weight"] for line in bench.lines] == [2.5, 2.5]
    assert all(line["output"] == "hello" for line in bench.lines)
    assert "temperature" not in bench.lines[0]
    assert bench.value("samples_total", segment="all", outcome="not_chosen") == 3


@pytest.mark.parametrize("no_train", [False, True])
async def test_mined_exchanges_are_marked_and_none_is_that_forbids_training(no_train: bool) -> None:
    bench = Bench(Room(2, 3))
    for number in range(10):
        bench.add(f"r{number}", no_train=no_train)
    await bench.harvest.flush()
    purposes = [(line["purpose"], line["weight"]) for line in bench.lines]
    mined = [] if no_train else [("mining", 1.0)] * 3
    assert purposes == [("estimate", 5.0)] * 2 + mined
    assert bench.value("samples_total", segment="all", outcome="not_chosen") == (8 if no_train else 5)


async def test_each_window_counts_those_not_chosen() -> None:
    bench = Bench()
    for window in range(3):
        for number in range(10):
            bench.add(f"r{window}-{number}")
        bench.sampler._close_open()
    await bench.harvest.flush()
    assert bench.value("samples_total", segment="all", outcome="not_chosen") == 24


async def test_those_that_were_not_admitted_were_not_chosen_and_those_that_were_lost_are_counted_elsewhere() -> None:
    bench = Bench()
    for admitted in (True, False):
        ticket = bench.sampler.ticket("all", 0.0)._replace(limit=float(admitted))
        bench.sampler.add("all", ticket, None, 0.0)
    await bench.harvest.flush()
    assert bench.value("samples_total", segment="all", outcome="not_chosen") == 1
    assert bench.lines == []


async def test_what_gives_no_record_is_counted_with_its_reason() -> None:
    bench = Bench()
    bench.add("r1", output="")
    await bench.harvest.flush()
    assert bench.lines == []
    assert bench.value("dropped_total", reason="no_output") == 1
    assert bench.value("samples_total", segment="all", outcome="skipped") == 1


async def test_a_failure_costs_one_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(module, "to_line", lambda *_: 1 / 0)
    bench.add("r1")
    await bench.harvest.flush()
    assert bench.value("dropped_total", reason="recorder_error") == 1


async def test_windows_are_collected_as_they_end_and_a_cancelled_run_loses_nothing() -> None:
    bench = Bench()
    task = asyncio.create_task(bench.harvest.run())
    bench.add("r1")

    async def collected() -> None:
        while not bench.lines:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    await asyncio.wait_for(collected(), 5)
    bench.sampler.add("all", bench.sampler.ticket("all", 1e9), _exchange(), 1e9)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await bench.harvest.flush()
    assert [line["id"] for line in bench.lines] == ["r1", "r2"]


def _exchange() -> Exchange:
    bench = Bench()
    bench.add("r2")
    return bench.sampler.flush()[0].kept[0].item


@pytest.mark.parametrize("running", [None, 3.5])
async def test_the_load_at_a_windows_end_goes_with_what_it_kept(running: float | None) -> None:
    bench = Bench()
    bench.harvest = Harvest(bench.sampler, bench.harvest._shipper, bench.metrics, running=lambda: running)
    bench.add("r1")
    await bench.harvest.flush()
    (line,) = bench.lines
    assert line.get("engine") == (None if running is None else {"running": running})
