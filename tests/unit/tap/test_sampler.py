from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from driftwatch.tap.sampler import Kept, Room, Sampler, Window

ARRIVALS = st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 20)), max_size=80)
WINDOW_S = 5.0


@dataclass(frozen=True)
class Request:
    number: int
    segment: str
    arrives: float
    ends: float
    copied: bool = True


def windows(
    requests: list[Request], room: int | Callable[[str], Room], seed: int = 0, until: float | None = None
) -> list[Window[Request]]:
    """All that a sampler makes of requests that arrive and end; ``until``: a clock that goes on so far."""
    sampler = Sampler[Request](room, WINDOW_S, draw=random.Random(seed).random)
    events = [(one.arrives, 0, one.number, one) for one in requests] + [
        (one.ends, 1, one.number, one) for one in requests
    ]
    heapq.heapify(events)
    tickets = {}
    found: list[Window[Request]] = []
    while events:
        now, ended, number, one = heapq.heappop(events)
        found += sampler.close(now)
        if not ended:
            tickets[number] = sampler.ticket(one.segment, now)
            continue
        ticket = tickets.pop(number)
        sampler.add(one.segment, ticket, one if ticket.admitted and one.copied else None, now)
    if until is not None:
        found += sampler.close(until)
    return found + sampler.flush()


def short(arrivals: list[tuple[str, float]]) -> list[Request]:
    """Requests that take no time."""
    ordered = sorted(arrivals, key=lambda arrival: arrival[1])
    return [Request(number, segment, now, now) for number, (segment, now) in enumerate(ordered)]


LONG = st.lists(
    st.builds(
        lambda segment, arrives, takes, copied: (segment, arrives, takes, copied),
        st.sampled_from("ab"),
        st.floats(0, 60),
        st.sampled_from([0.0, 0.1, 3.0, 12.0, 40.0]),
        st.booleans(),
    ),
    max_size=150,
)


@given(ARRIVALS, st.integers(1, 10))
def test_weights_of_a_window_add_up_to_all_that_it_saw(arrivals: list[tuple[str, float]], per_window: int) -> None:
    sums: Counter[tuple[str, int]] = Counter()
    for window in windows(short(arrivals), per_window):
        assert len(window.kept) == min(window.seen, per_window), "so little traffic that all are admitted"
        assert window.not_chosen == window.seen - len(window.kept)
        for kept in window.kept:
            assert kept.weight == window.seen / len(window.kept)
            sums[kept.segment, int(kept.item.ends // 5)] += Fraction(window.seen, len(window.kept))  # type: ignore[assignment]
    assert sums == Counter((segment, int(now // 5)) for segment, now in arrivals)


@settings(max_examples=200)
@given(LONG, st.integers(1, 4), st.integers(0, 2), st.integers(0, 2**32))
@example([("a", i / 100, 0.0, True) for i in range(400)] + [("a", 7.0 + i, 0.0, True) for i in range(9)], 1, 0, 1)
def test_weights_add_up_to_all_however_long_requests_take_and_however_traffic_moves(
    requests: list[tuple[str, float, float, bool]], estimate: int, mining: int, seed: int
) -> None:
    """The windows behind one without a sample stand for it, so only those at the end may go without."""
    room = Room(estimate, mining)
    listed = [Request(i, segment, at, at + takes) for i, (segment, at, takes, _) in enumerate(requests)]
    for segment in "ab":
        found = [window for window in windows(listed, lambda _segment: room, seed) if window.segment == segment]
        assert sum(window.seen for window in found) == sum(one.segment == segment for one in listed)
        owed = 0.0
        for window in found:
            estimates = [kept for kept in window.kept if kept.purpose == "estimate"]
            assert len(estimates) <= estimate
            assert len(window.kept) <= sum(room)
            assert len({kept.item.number for kept in window.kept}) == len(window.kept)
            assert len({kept.weight for kept in estimates}) <= 1
            owed += window.seen
            if estimates:
                assert sum(kept.weight for kept in estimates) == pytest.approx(owed)
                owed = 0.0


@given(LONG, st.integers(1, 4), st.integers(0, 2**32))
def test_what_was_lost_is_not_counted_among_those_that_might_have_been_chosen(
    requests: list[tuple[str, float, float, bool]], per_window: int, seed: int
) -> None:
    listed = [Request(i, segment, at, at + takes, copied) for i, (segment, at, takes, copied) in enumerate(requests)]
    for window in windows(listed, per_window, seed):
        assert window.seen == window.lost + window.not_chosen + len(window.kept)
        assert min(window.lost, window.not_chosen) >= 0
        assert all(kept.item.copied for kept in window.kept)
        if window.seen <= 8:  # all were admitted: none is unknown
            ended = [
                one
                for one in listed
                if one.segment == window.segment
                and window.kept
                and int(one.ends // WINDOW_S) == int(window.kept[0].item.ends // WINDOW_S)
            ]
            assert window.lost == sum(not one.copied for one in ended) or not window.kept


@given(ARRIVALS, st.integers(1, 10), st.integers(0, 2**32))
def test_the_same_draws_choose_the_same(arrivals: list[tuple[str, float]], per_window: int, seed: int) -> None:
    assert windows(short(arrivals), per_window, seed) == windows(short(arrivals), per_window, seed)


def test_every_exchange_is_kept_equally_often() -> None:
    """Of 20 exchanges 5 are kept: over 4000 runs each about 1000 times. The bound is five standard deviations."""
    counts: Counter[int] = Counter()
    for seed in range(4000):
        for window in windows(short([("a", 1.0)] * 20), 5, seed):
            counts.update(kept.item.number for kept in window.kept)
    assert sum(counts.values()) == 20_000
    assert all(abs(counts[number] - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5 for number in range(20))


def moving() -> list[Request]:
    """Over two minutes: 8 requests a second, then 80, then 8 again. Every fifth takes 12 s, the others a tenth of one:
    long and short ones end in the same windows, admitted under other limits."""
    spans = ((0.0, 40.0, 8), (40.0, 60.0, 80), (60.0, 140.0, 8))
    arrivals = [begin + i / rate for begin, end, rate in spans for i in range(int((end - begin) * rate))]
    return [Request(i, "a", at, at + (12.0 if i % 5 == 0 else 0.1)) for i, at in enumerate(arrivals)]


def test_estimates_are_unbiased_where_long_requests_overlap_a_burst_and_its_end() -> None:
    """Totals of the long and of the short ones, before, in and behind the burst, over 400 runs. The bound is five
    standard errors, and the totals are known well enough for it to mean something."""
    requests = moving()

    def kind(one: Request) -> tuple[bool, int]:
        return one.ends - one.arrives > 1, int(one.ends // 20)

    true = Counter(kind(one) for one in requests)
    totals: dict[tuple[bool, int], list[float]] = {key: [] for key in true}
    sizes = []
    for seed in range(400):
        sums: Counter[tuple[bool, int]] = Counter()
        for window in windows(requests, 8, seed, until=200.0):
            sizes.append(len(window.kept))
            for kept in window.kept:
                sums[kind(kept.item)] += kept.weight  # type: ignore[assignment]
        for key, values in totals.items():
            values.append(sums[key])
    assert max(sizes) == 8
    for key, values in totals.items():
        if key[1] >= 6:
            continue  # the last windows may go without a sample, as nothing comes behind them
        error = np.std(values) / len(values) ** 0.5
        assert abs(np.mean(values) - true[key]) < 5 * error, key
        assert error < 0.05 * max(true[key], 40), key


def test_losses_change_no_estimate_of_the_others() -> None:
    """Every third copy is lost: the kept ones stand for the others alone, and the room is filled all the same."""
    requests = [Request(i, "a", i / 20, i / 20, i % 3 > 0) for i in range(800)]
    sums, sizes = [], []
    for seed in range(200):
        found = windows(requests, 5, seed, until=100.0)
        sizes += [len(window.kept) for window in found]
        sums.append(sum(kept.weight for window in found for kept in window.kept))
    true = sum(one.copied for one in requests)
    assert abs(np.mean(sums) - true) < 5 * np.std(sums) / len(sums) ** 0.5
    assert np.std(sums) < 0.2 * true
    assert np.mean(sizes) > 4.9


def test_a_window_that_admitted_none_is_stood_for_without_those_that_would_have_been_lost() -> None:
    """Behind a burst, long ones of it end among few others: their limit is small, and most windows admit none. Half of
    the copies are lost, of the long ones as of the short ones."""
    spans = ((0.0, 20.0, 2), (20.0, 40.0, 100), (40.0, 200.0, 1), (200.0, 300.0, 5))
    arrivals = [begin + i / rate for begin, end, rate in spans for i in range(int((end - begin) * rate))]
    requests = [Request(i, "a", at, at + (60.0 if i % 50 < 2 else 0.1), i % 2 == 0) for i, at in enumerate(arrivals)]
    true = sum(one.copied and one.ends > 40 for one in requests)
    sums, went_without = [], 0
    for seed in range(200):
        found = windows(requests, 4, seed, until=400.0)
        went_without += sum(not window.kept for window in found)
        sums.append(sum(kept.weight for window in found for kept in window.kept if kept.item.ends > 40))
    assert went_without > 200
    error = np.std(sums) / len(sums) ** 0.5
    assert abs(np.mean(sums) - true) < 5 * error
    assert error < 0.01 * true


def test_few_are_admitted_and_the_room_is_filled() -> None:
    requests = [Request(i, "a", i / 100, i / 100) for i in range(10_000)]
    admitted = 0
    sampler = Sampler[Request](8, WINDOW_S, draw=random.Random(3).random)
    sizes = []
    for one in requests:
        sizes += [len(window.kept) for window in sampler.close(one.arrives)]
        ticket = sampler.ticket("a", one.arrives)
        admitted += ticket.admitted
        sampler.add("a", ticket, one if ticket.admitted else None, one.ends)
    assert sizes == [8] * len(sizes)
    assert len(sizes) == 19
    # All of the first window of 500; then 22 of each.
    assert 500 + 19 * 22 * 0.7 < admitted < 500 + 19 * 22 * 1.3


def test_the_window_behind_one_that_kept_none_stands_for_it() -> None:
    sampler = Sampler[int](1, 1.0, draw=iter([0.0] * 100 + [0.9] * 2 + [0.0]).__next__)
    for _ in range(100):
        sampler.add("a", sampler.ticket("a", 0.5), 1, 0.5)
    for now in (1.1, 1.2):  # no more than 8 in 100 are admitted now, and these were not
        ticket = sampler.ticket("a", now)
        assert not ticket.admitted
        sampler.add("a", ticket, None, now)
    sampler.add("a", sampler.ticket("a", 2.5), 3, 2.5)
    first, second, third = sampler.flush()
    assert first == Window("a", 100, 0, [Kept("a", 1, 100.0)])
    assert second == Window("a", 2, 0, [])
    assert (second.not_chosen, third) == (2, Window("a", 1, 0, [Kept("a", 3, 3.0)]))


def test_all_are_admitted_again_behind_a_window_without_traffic() -> None:
    sampler = Sampler[int](1, 1.0)
    for _ in range(1000):
        sampler.add("a", sampler.ticket("a", 0.5), None, 0.5)
    assert sampler.ticket("a", 1.5).limit == 8 / 1000
    assert sampler.ticket("b", 1.5).limit == 1.0
    assert sampler.ticket("a", 2.5).limit == 1.0
    assert Room(8).limit(22) == Room(8).limit(0) == 1.0
    assert Room(3, 2).limit(32) == 0.5


def test_windows_are_closed_by_time_alone() -> None:
    sampler = Sampler[int](2, 10.0)
    sampler.add("a", sampler.ticket("a", 101.0), 1, 101.0)
    assert sampler.close(109.9) == []
    assert sampler.ends_in(109.0) == pytest.approx(1.0)
    assert sampler.close(110.0) == [Window("a", 1, 0, [Kept("a", 1, 1.0)])]
    assert sampler.close(120.0) == []
    assert sampler.held == 0


@given(st.integers(0, 40), st.integers(1, 10), st.integers(0, 10))
def test_mining_takes_the_next_and_changes_nothing_in_the_sample(arrived: int, estimate: int, mining: int) -> None:
    requests = short([("a", 1.0)] * arrived)
    (with_it, without) = (
        [kept for window in windows(requests, lambda _segment, room=room: room) for kept in window.kept]  # type: ignore[misc]
        for room in (Room(estimate, mining), Room(estimate))
    )
    estimates = [one for one in with_it if one.purpose == "estimate"]
    assert [(one.item, one.weight) for one in estimates] == [(one.item, one.weight) for one in without]
    mined = [one for one in with_it if one.purpose == "mining"]
    assert len(mined) == min(mining, max(arrived - estimate, 0))
    assert all(one.weight == 1.0 for one in mined)
    assert len({one.item.number for one in with_it}) == len(with_it)


def test_a_window_keeps_the_room_that_it_opened_with() -> None:
    room = {"a": 2, "b": 1}
    sampler = Sampler[int](lambda segment: Room(room[segment]), 5.0)
    for number in range(10):
        for segment in "ab":
            sampler.add(segment, sampler.ticket(segment, 1.0), number, 1.0)
        room["a"] = 5
    first = sampler.close(5.0)
    assert {(window.segment, len(window.kept), window.kept[0].weight) for window in first} == {
        ("a", 2, 5.0),
        ("b", 1, 10.0),
    }
    for number in range(10):
        sampler.add("a", sampler.ticket("a", 6.0), number, 6.0)
    (second,) = sampler.flush()
    assert [kept.weight for kept in second.kept] == [2.0] * 5


def test_room_for_nothing_keeps_nothing_and_leaves_nothing_to_stand_for() -> None:
    room = Room(0)
    sampler = Sampler[int](lambda _segment: room, 5.0)
    for _ in range(10):
        sampler.add("a", sampler.ticket("a", 1.0), 1, 1.0)
    assert sampler.close(5.0) == [Window("a", 10, 0, [])]
    room = Room(1)
    sampler.add("a", sampler.ticket("a", 6.0)._replace(draw=0.0), 1, 6.0)
    assert sampler.flush() == [Window("a", 1, 0, [Kept("a", 1, 1.0)])]
