from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from driftwatch.tap.places import SILENT_S, Places

VISITS = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.sampled_from([0.0, 1.0, SILENT_S / 2, SILENT_S])), max_size=60
)


@given(VISITS, st.integers(1, 4))
def test_names_keep_their_places_while_they_come_and_no_more_than_the_limit_have_one(
    visits: list[tuple[str, float]], limit: int
) -> None:
    now = 0.0
    last: dict[str, float] = {}
    freed: list[str] = []
    places = Places(limit, clock=lambda: now, freed=freed.append)
    for name, passed in visits:
        now += passed
        freed.clear()
        had = name in last
        has = places.take(name)
        assert has or not had, "nobody loses a place by coming"
        for one in freed:
            assert not had
            assert now - last.pop(one) >= SILENT_S
        if not has:
            assert len(last) == limit
            assert all(now - seen < SILENT_S for seen in last.values())
        else:
            last[name] = now
        assert len(last) <= limit
        assert len(freed) <= 1
