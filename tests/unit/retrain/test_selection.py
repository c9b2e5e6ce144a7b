"""Which requests become training data."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.retrain.selection import Occasion, balanced, choose, for_evaluation
from driftwatch.settings import TrainingData
from driftwatch.store.training import Served

EVENT = Occasion("tenant=a", "off", 100.0, "a")


def served(number: int, tenant: str | None = "a", **fields: Any) -> Served:
    values: dict[str, Any] = {
        "sample_id": number,
        "request_id": f"r{number}",
        "session": None,
        "segment": f"tenant={tenant}",
        "labels": {} if tenant is None else {"tenant": tenant},
        "served_at": 200.0,
        "tokens": 10,
        "split": "off",
        "first_hits": 0.5,
        "forbidden": False,
    }
    return Served(**values | fields)


def test_the_mix_is_of_the_event_the_worst_and_the_time_before() -> None:
    event = [served(i) for i in range(600)]
    on = [served(i, split="on", first_hits=i / 10_000) for i in range(1000, 1400)]
    before = [served(i, served_at=50.0, split="on", first_hits=0.9) for i in range(2000, 2800)]
    choice = choose([*event, *on, *before], EVENT, TrainingData())
    assert choice.counts == {"event": 600, "low": 200, "replay": 200}
    low = [sample for sample, pool in choice.pools.items() if pool == "low"]
    assert set(low) <= set(range(1000, 1300))  # of the worst quarter of what is not the event's
    assert all(sample >= 2000 for sample, pool in choice.pools.items() if pool == "replay")


def test_after_a_change_of_the_target_nothing_from_before_is_taken() -> None:
    rows = [served(i) for i in range(50)] + [served(i, served_at=50.0) for i in range(100, 200)]
    late = Occasion("tenant=a", "off", 100.0, "a", earlier=False)
    assert set(choose(rows, late, TrainingData()).pools) <= set(range(50))


def test_what_is_not_allowed_is_counted_by_its_reason() -> None:
    rows = [served(0), served(1, forbidden=True), served(2, "b"), served(3, "c"), served(4, None)]
    choice = choose(rows, EVENT, TrainingData(exclude_tenants=["c"]))
    assert set(choice.pools) == {0}
    assert choice.left_out == {"forbidden_by_client": 1, "excluded_tenant": 1, "another_tenant": 2}
    mixed = choose(rows, Occasion(None, None, 100.0, "a"), TrainingData(exclude_tenants=["c"], cross_tenant=True))
    assert set(mixed.pools) == {0, 2, 4}


def test_the_caps_hold_and_take_every_pool_alike() -> None:
    rows = [served(i) for i in range(1000)] + [served(i, served_at=50.0) for i in range(1000, 2000)]
    by_rows = choose(rows, EVENT, TrainingData(max_rows=100))
    assert by_rows.counts == {"event": 60, "low": 20, "replay": 20}
    assert by_rows.left_out == {"over_cap": 940}
    by_tokens = choose(rows, EVENT, TrainingData(max_tokens=2000))
    assert sum(by_tokens.counts.values()) == 200
    assert by_tokens.counts["event"] == pytest.approx(120, abs=30)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 300), st.booleans()), max_size=60),
    st.integers(1, 40),
)
def test_a_choice_is_allowed_capped_and_the_same_again(rows: list[tuple[str, float, bool]], cap: int) -> None:
    found = [
        served(i, tenant, served_at=at, forbidden=no, first_hits=at / 300) for i, (tenant, at, no) in enumerate(rows)
    ]
    rules = TrainingData(max_rows=cap, exclude_tenants=["b"])
    choice = choose(found, EVENT, rules)
    chosen = [row for row in found if row.sample_id in choice.pools]
    assert all(row.labels["tenant"] == "a" and not row.forbidden for row in chosen)
    assert len(chosen) <= cap
    assert choose(found[::-1], EVENT, rules).pools == choice.pools


@given(st.lists(st.sampled_from("abcd"), max_size=80), st.integers(0, 60))
def test_segments_are_as_even_as_they_allow(segments: list[str], most: int) -> None:
    chosen = balanced([served(i, tenant) for i, tenant in enumerate(segments)], most)
    assert len(chosen) <= most
    there, taken = Counter(segments), Counter(str(row.labels["tenant"]) for row in chosen)
    for tenant, count in taken.items():
        # Nobody gives up room to one that already has more, or nearly so.
        assert all(taken[other] >= count - 1 or taken[other] == there[other] for other in there), tenant


def test_a_session_lies_on_one_side_of_the_split() -> None:
    is_kept = for_evaluation(0.3)
    rows = [served(i, session=f"s{i // 10}") for i in range(2000)]
    kept = {row.session for row in rows if is_kept(row)}
    assert not kept & {row.session for row in rows if not is_kept(row)}
    assert 40 <= len(kept) <= 80
    assert not any(map(for_evaluation(0.0), rows))


@given(st.integers(0, 10**9), st.one_of(st.none(), st.text(max_size=5)), st.floats(0, 0.99), st.floats(0, 0.99))
def test_the_side_of_a_request_is_its_own_and_stays(number: int, session: str | None, one: float, other: float) -> None:
    """Whatever else is exported, and when: a larger share only adds."""
    row = served(number, session=session)
    less, more = (for_evaluation(share)(row) for share in sorted((one, other)))
    assert more or not less
    late = served(number, session=session, served_at=900.0, split="on", segment="x", sample_id=7)
    assert for_evaluation(one)(row) == for_evaluation(one)(late)
