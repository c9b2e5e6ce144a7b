from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from driftwatch.control.page.door import ADDRESSES, FAILURES, VALID_S, WINDOW_S, Door


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def test_without_a_token_it_stands_open() -> None:
    door = Door(None, Clock())
    assert not door.locked
    assert door.lets_in(None)
    assert door.cookie("anything") is None


def test_a_cookie_opens_it_until_its_end_and_holds_no_token() -> None:
    clock = Clock()
    door = Door("s3cret-token", clock)
    assert not door.lets_in(None)
    cookie = door.cookie("s3cret-token")
    assert cookie is not None
    assert "s3cret-token" not in cookie
    assert door.lets_in(cookie)
    assert Door("s3cret-token", clock).lets_in(cookie), "another replica knows it too"
    assert not Door("another", clock).lets_in(cookie), "a changed token ends it"
    clock.now += VALID_S
    assert not door.lets_in(cookie)


def test_an_end_that_was_put_off_does_not_open_it() -> None:
    door = Door("secret", Clock())
    end, _, seal = (door.cookie("secret") or "").partition(".")
    assert not door.lets_in(f"{int(end) + 1}.{seal}")
    assert not door.lets_in(f"{end}.{seal[:-1]}")
    assert not door.lets_in(f"٣{end[1:]}.{seal}"), "a digit, but none of ours"


@given(st.text())
def test_nothing_made_up_opens_it(cookie: str) -> None:
    assert not Door("secret", Clock()).lets_in(cookie)


@given(st.text(), st.text(min_size=1))
def test_only_the_token_gets_a_cookie(given_: str, token: str) -> None:
    token = token.encode("utf-8", "replace").decode()
    given_ = given_.encode("utf-8", "replace").decode()
    assert (Door(token, Clock()).cookie(given_) is not None) == (given_ == token)


def test_after_some_wrong_tokens_an_address_waits_and_others_do_not() -> None:
    clock = Clock()
    door = Door("secret", clock)
    for _ in range(FAILURES):
        assert door.wait_s("a") == 0
        door.failed("a")
        clock.now += 1
    assert door.wait_s("a") == WINDOW_S - FAILURES
    assert door.wait_s("b") == 0
    clock.now += WINDOW_S - FAILURES
    assert door.wait_s("a") == 0


def test_many_addresses_together_wait_too_and_cost_no_memory() -> None:
    clock = Clock()
    door = Door("secret", clock)
    for i in range(10 * FAILURES):
        assert door.wait_s(f"address {i}") == 0
        door.failed(f"address {i}")
    assert door.wait_s("a new one") == WINDOW_S
    clock.now += WINDOW_S
    assert door.wait_s("a new one") == 0
    for i in range(2 * ADDRESSES):
        door.failed(f"more {i}")
    assert len(door._failures) == ADDRESSES
