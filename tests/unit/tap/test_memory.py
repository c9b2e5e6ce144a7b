from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from driftwatch.tap.memory import Memory, Share

STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60) | st.none()), max_size=40)


@settings(deadline=None)
@given(STEPS)
def test_what_is_held_never_exceeds_the_bound_and_all_of_it_comes_back(steps: list[tuple[int, int | None]]) -> None:
    memory = Memory(100)
    shares = [Share(memory) for _ in range(3)]
    for which, size in steps:
        share = shares[which]
        before = share.size
        if size is None:
            share.clear()
            assert share.size == 0
        elif share.take(size):
            assert share.size == before + size
        else:
            assert (share.size, memory.left < size) == (before, True)
        assert memory.left + sum(one.size for one in shares) == 100
        assert memory.left >= 0
    for share in shares:
        share.clear()
    assert memory.left == 100
