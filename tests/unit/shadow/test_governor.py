"""The governor, on a clock that moves only when somebody waits or works."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.settings import Governor as Limits
from driftwatch.shadow.governor import BUSY_WINDOW_S, FIRST_BACKOFF_S, LONGEST_BACKOFF_S, Governor, Reason, Stopped


class World:
    """A clock, and what the governor can see."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pressure: list[tuple[float, Reason | None]] = []
        self.free: list[tuple[float, int]] = []
        self.stop_at = float("inf")

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return self.now >= self.stop_at

    def pressed(self) -> Reason | None:
        return next((reason for until, reason in self.pressure if self.now < until), None)

    def free_bytes(self) -> int | None:
        return next((size for until, size in self.free if self.now < until), None)

    def governor(self, limits: Limits) -> Governor:
        return Governor(limits, self.wait, pressure=self.pressed, free_bytes=self.free_bytes, clock=self.clock)


def work(world: World, governor: Governor, seconds: float) -> None:
    with governor.turn():
        world.now += seconds


@given(st.floats(0.05, 1.0), st.lists(st.floats(0.01, 5.0), min_size=2, max_size=30))
def test_share_of_time(share: float, batches: list[float]) -> None:
    """Whatever the batches' lengths, work takes its share of the time from the first batch's start to the next turn."""
    world = World()
    governor = world.governor(Limits(busy_share=share))
    for seconds in batches:
        work(world, governor, seconds)
    with governor.turn():
        elapsed = world.now
    assert sum(batches) / elapsed == pytest.approx(share, rel=1e-6)
    assert governor.seconds_waited["share"] == pytest.approx(elapsed - sum(batches), abs=1e-6)


def test_nothing_asked_for_nothing_waited() -> None:
    world = World()
    governor = world.governor(Limits())
    for _ in range(10):
        work(world, governor, 1.0)
    assert world.now == 10.0
    assert not any(governor.pauses.values())
    assert governor.busy_ratio == pytest.approx(10.0 / BUSY_WINDOW_S)


@pytest.mark.parametrize("reason", ["queue", "latency", "engine_unknown"])
def test_gives_way_to_the_engine(reason: Reason) -> None:
    world = World()
    governor = world.governor(Limits())
    world.pressure = [(30.0, reason)]
    work(world, governor, 1.0)
    assert 31.0 <= world.now < 34.0, "it goes on soon after the pressure is gone"
    assert governor.pauses[reason] == 1
    assert governor.seconds_waited[reason] == pytest.approx(world.now - 1.0)
    assert governor.waiting_for is None


def test_headroom() -> None:
    world = World()
    governor = world.governor(Limits(headroom_bytes=2_000))
    world.free = [(20.0, 1_000), (float("inf"), 3_000)]
    work(world, governor, 1.0)
    assert 21.0 <= world.now < 24.0
    assert governor.pauses["headroom"] == 1


def test_backs_off_after_out_of_memory_and_forgets_once_it_works() -> None:
    world = World()
    governor = world.governor(Limits())
    gaps, before = [], 0.0

    def fail() -> None:
        with governor.turn():
            gaps.append(world.now - before)
            raise torch.OutOfMemoryError

    for _ in range(10):
        with pytest.raises(torch.OutOfMemoryError):
            fail()
        before = world.now
    assert gaps[:4] == [0.0, FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S]
    assert gaps[-1] == LONGEST_BACKOFF_S
    assert governor.out_of_memory == 10
    work(world, governor, 1.0)
    before = world.now
    with pytest.raises(torch.OutOfMemoryError):
        fail()
    work(world, governor, 0.0)
    assert world.now - before == FIRST_BACKOFF_S


def test_another_error_is_no_lack_of_memory() -> None:
    world = World()
    governor = world.governor(Limits())
    with pytest.raises(RuntimeError, match="shape"), governor.turn():
        raise RuntimeError("shape")
    assert governor.out_of_memory == 0
    assert governor.obstacle() is None


def test_told_to_stop_while_it_waits() -> None:
    world = World()
    governor = world.governor(Limits())
    world.pressure, world.stop_at = [(1e9, "queue")], 10.0
    with pytest.raises(Stopped), governor.turn():
        pytest.fail("the batch must not run")


def test_a_long_pause_is_no_hang() -> None:
    world = World()
    governor = world.governor(Limits())
    world.pressure = [(10_000.0, "queue")]
    work(world, governor, 0.0)
    assert world.now - governor.last_seen <= 2.0
