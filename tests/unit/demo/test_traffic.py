from __future__ import annotations

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.demo.engine import free_ports
from driftwatch.demo.traffic import SHIFTING, Users, plan
from driftwatch.errors import DriftwatchError


@given(requests=st.integers(2, 300), seed=st.integers(0, 5), shift=st.booleans(), further=st.integers(0, 100))
def test_further_requests_change_none_before_them(requests: int, seed: int, shift: bool, further: int) -> None:
    short, middle = plan(requests, seed=seed, shift=shift)
    long, same = plan(requests, seed=seed, shift=shift, further=further)
    assert (long[:requests], same) == (short, middle)
    assert len(long) == requests + further
    for request in long:
        moved = shift and request.tenant == SHIFTING and request.index >= middle
        assert (request.kind == "chat") == moved


async def test_users_send_in_turns_and_a_refused_request_is_one_error() -> None:
    """A server of one answer in place of the tap: it refuses the fifth request."""
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers["x-request-id"])
        return web.json_response({}, status=500 if len(seen) == 5 else 200)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    planned, _ = plan(6, seed=0, shift=False)
    users = Users(f"http://127.0.0.1:{port}", "m", planned, lambda _: None)
    try:
        await users.send(3)
        assert sorted(seen) == [request.id for request in planned[:3]] == [request.id for request in users.sent]
        with pytest.raises(DriftwatchError, match="was answered 500"):
            await users.send(10)
    finally:
        await runner.cleanup()
    with pytest.raises(DriftwatchError, match="was not answered"):
        await Users(f"http://127.0.0.1:{port}", "m", planned, lambda _: None).send(1)
