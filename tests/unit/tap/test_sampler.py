from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.tap.sampler import Kept, Sampler

ARRIVALS = st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 20)), max_size=80)
KEY = b"k"


def sample(arrivals: list[tuple[str, float]], per_window: int, key: bytes = KEY) -> list[Kept[int]]:
    """Everything kept of exchanges numbered by arrival, as (segment, time)."""
    sampler = Sampler[int](per_window, 5.0, key=key)
    kept: list[Kept[int]] = []
    for number, (segment, now) in enumerate(sorted(arrivals, key=lambda arrival: arrival[1])):
        kept += sampler.close(now)
        sampler.add(segment, f"id-{number}", number, now)
        assert sampler.held <= 3 * per_window
    return kept + sampler.flush()


@given(ARRIVALS, st.integers(1, 10))
def test_weights_of_a_window_add_up_to_all_that_it_saw(arrivals: list[tuple[str, float]], per_window: int) -> None:
    weights: Counter[tuple[str, int]] = Counter()
    for kept in sample(arrivals, per_window):
        now = sorted(time for _, time in arrivals)[kept.item]
        weights[kept.segment, int(now // 5)] += Fraction(kept.seen, kept.kept)  # type: ignore[assignment]
        assert kept.weight == kept.seen / kept.kept
    assert weights == Counter((segment, int(now // 5)) for segment, now in arrivals)


@given(ARRIVALS, st.integers(1, 10))
def test_no_more_are_kept_than_asked_for_and_as_many_as_there_are(
    arrivals: list[tuple[str, float]], per_window: int
) -> None:
    for kept in sample(arrivals, per_window):
        assert kept.kept == min(kept.seen, per_window)


@given(ARRIVALS, st.integers(1, 10))
def test_the_same_key_chooses_the_same(arrivals: list[tuple[str, float]], per_window: int) -> None:
    assert sample(arrivals, per_window) == sample(arrivals, per_window)


@given(st.permutations(range(12)))
def test_the_order_of_arrival_does_not_matter(order: list[int]) -> None:
    sampler = Sampler[int](3, 5.0, key=KEY)
    for number in order:
        sampler.add("a", f"id-{number}", number, 1.0)
    assert {kept.item for kept in sampler.flush()} == _three_of_twelve()


def _three_of_twelve() -> set[int]:
    sampler = Sampler[int](3, 5.0, key=KEY)
    for number in range(12):
        sampler.add("a", f"id-{number}", number, 1.0)
    return {kept.item for kept in sampler.flush()}


def test_every_exchange_is_kept_equally_often() -> None:
    """Of 20 exchanges 5 are kept: over 4000 keys each about 1000 times. The bound is five standard deviations."""
    counts: Counter[int] = Counter()
    keys = random.Random(1)
    for _ in range(4000):
        kept = sample([("a", 1.0)] * 20, 5, key=keys.randbytes(16))
        counts.update(one.item for one in kept)
    assert sum(counts.values()) == 20_000
    assert all(abs(counts[number] - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5 for number in range(20))


@pytest.mark.parametrize("id", ["a", "b", "c", "d", "e", "f"])
def test_an_id_sent_again_and_again_is_kept_as_often_as_others(id: str) -> None:
    """Against one other exchange a window: about 100 times in 200. The bound is five standard deviations."""
    sampler = Sampler[str](1, 1.0, key=KEY)
    for window in range(200):
        sampler.add("a", id, "same", window)
        sampler.add("a", f"other-{window}", "other", window)
    chosen = Counter(kept.item for kept in sampler.flush())
    assert 65 <= chosen["same"] <= 135


def test_windows_are_closed_by_time_alone() -> None:
    sampler = Sampler[int](2, 10.0, key=KEY)
    sampler.add("a", "1", 1, 101.0)
    assert sampler.close(109.9) == []
    assert sampler.ends_in(109.0) == pytest.approx(1.0)
    assert sampler.close(110.0) == [Kept("a", 1, 1, 1)]
    assert sampler.close(120.0) == []
    assert sampler.held == 0


def test_keys_differ_between_processes() -> None:
    assert Sampler[int](1, 1.0)._hash("a") != Sampler[int](1, 1.0)._hash("a")
