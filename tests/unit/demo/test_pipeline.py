from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from driftwatch.demo import loop, pipeline
from driftwatch.demo.engine import free_ports
from driftwatch.errors import DriftwatchError
from driftwatch.settings import load


@pytest.mark.parametrize("retrain", [False, True])
def test_the_settings_are_accepted(tmp_path: Path, retrain: bool) -> None:
    ports = loop.Ports(*range(1001, 1008))
    written = loop.settings(ports, tmp_path, tmp_path / "target", "whsec_MDEyMzQ1Njc4OWFiY2RlZg==", retrain=retrain)
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(written))
    found = load(tmp_path / "settings.yaml")
    assert [hook.name for hook in found.webhooks] == ["retrain", "pipeline"][: 1 + retrain]
    assert found.retrain.candidates_dir == (tmp_path / "candidates" if retrain else None)


def test_the_receiver_is_the_one_that_is_deployed() -> None:
    assert "standardwebhooks" in (pipeline.reference() / "receiver.py").read_text()


@asynccontextmanager
async def control(*retrains: dict[str, Any]) -> AsyncIterator[str]:
    """Control's API with one retrain, a look further each time that it is listed; its URL."""
    waiting, shown = list(retrains), dict[str, Any]()

    async def listed(_: web.Request) -> web.Response:
        shown.update(waiting.pop(0) if len(waiting) > 1 else waiting[0])
        return web.json_response({"retrains": [shown]})

    async def one(_: web.Request) -> web.Response:
        return web.json_response(shown)

    app = web.Application()
    app.router.add_get("/v1/retrains", listed)
    app.router.add_get("/v1/retrains/r", one)
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def retrain(*states: str, reason: str | None = None, candidate: str | None = None) -> dict[str, Any]:
    steps = [{"after": state, "reason": None} for state in states]
    found = [] if candidate is None else [{"state": candidate}]
    return {"id": "r", "state": states[-1], "reason": reason, "history": steps, "candidates": found}


async def test_each_step_is_said_once_and_requests_are_called_for_while_the_gate_wants_them() -> None:
    said: list[str] = []
    calls: list[int] = []

    async def more() -> None:
        calls.append(len(said))

    looks = [
        retrain("suppressed", reason="not yet"),
        retrain("proposed", "requested"),
        retrain("proposed", "requested", "evaluating", candidate="history"),
        retrain("proposed", "requested", "evaluating", candidate="live"),
        retrain("proposed", "requested", "evaluating", "promoted", candidate="promoted"),
    ]
    async with control(*looks) as url:
        found = await pipeline.followed(url, said.append, more)
    assert found["state"] == "promoted"
    assert said == ["retrain: proposed", "retrain: requested", "retrain: evaluating", "retrain: promoted"]
    assert calls == [3]


async def test_a_training_that_fails_is_one_error() -> None:
    async def more() -> None:
        raise AssertionError

    async with control(retrain("proposed", "failed", reason="no space left")) as url:
        with pytest.raises(DriftwatchError, match=r"the retrain is failed: no space left"):
            await pipeline.followed(url, lambda _: None, more)
    with pytest.raises(DriftwatchError, match="control did not answer /v1/retrains"):
        await pipeline.followed(url, lambda _: None, more)
