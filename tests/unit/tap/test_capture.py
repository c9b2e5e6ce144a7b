from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from driftwatch.tap.capture import Capture
from driftwatch.tap.memory import Memory


@given(st.binary(max_size=60), st.lists(st.binary(max_size=40), max_size=6), st.integers(0, 100), st.integers(0, 150))
def test_a_copy_is_whole_or_lost_and_never_holds_more_than_it_may(
    request_: bytes, pieces: list[bytes], limit: int, room: int
) -> None:
    memory = Memory(room)
    copy = Capture(limit, memory)
    copy.begin(request_)
    for piece in pieces:
        copy.add(piece)
        assert memory.left >= 0
    answer = b"".join(pieces)
    if copy.lost is None:
        assert (copy.request, copy.answer) == (request_, answer)
        assert memory.left == room - len(request_) - len(answer)
    else:
        assert copy.lost == "memory" or len(answer) > limit
        assert (copy.request, copy.answer, memory.left) == (None, b"", room)
    copy.share.clear()
    assert memory.left == room


def test_what_was_lost_stays_lost() -> None:
    memory = Memory(100)
    copy = Capture(10, memory)
    copy.begin(b"request")
    copy.add(b"x" * 11)
    copy.add(b"x")
    assert (copy.lost, copy.answer, memory.left) == ("too_large", b"", 100)
    copy = Capture(10, Memory(3))
    copy.begin(b"request")
    assert (copy.lost, copy.request) == ("memory", None)
