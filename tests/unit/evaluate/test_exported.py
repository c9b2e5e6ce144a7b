"""Step times from an engine's own metrics: of recorded texts, and of a server that is read while it counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from driftwatch.economics.step import StepTime
from driftwatch.errors import DriftwatchError, ProfileError
from driftwatch.evaluate.exported import NAMES, Reading, point, read, watch

METRICS = Path(__file__).parents[2] / "data" / "metrics"
BUSY = Reading(10.0, latency_s=40.0, steps=2000.0, prompt_tokens=1000.0, output_tokens=2000.0, requests=10.0)


def recorded(name: str) -> Reading:
    found = read((METRICS / f"{name}.txt").read_text(), 0.0)
    assert found is not None
    return found


def test_a_recorded_vllm() -> None:
    """One observation a step of a request, with speculation and without: what the times rest on."""
    speculating = recorded("draft3.T0.metrics_after").since(recorded("draft3.T0.metrics_before"))
    plain = recorded("baseline.T0.metrics_after")
    assert (speculating.steps, speculating.windows, speculating.drafted) == (3365, 3365, 3 * 3365)
    assert (plain.steps, plain.windows) == (120 * 63, 0)
    one, other = point(replace(plain, at=30.0), 100.0), point(replace(speculating, at=30.0), 100.0)
    assert one is not None
    assert other is not None
    assert (one.part, one.gamma, other.part, other.gamma) == ("target", 0, "window", 3)
    assert one.seconds == pytest.approx(53.103 / 7560, rel=1e-4)
    assert other.seconds == pytest.approx(54.161 / 3365, rel=1e-4)
    assert one.batch == pytest.approx(53.103 / 30.0, rel=1e-4)


@pytest.mark.parametrize(
    "risen",
    [
        replace(BUSY, steps=10.0),
        replace(BUSY, steps=-2000.0),
        replace(BUSY, at=0.0),
        replace(BUSY, windows=1000.0, drafted=3000.0),  # half of the steps were plain
        replace(BUSY, windows=2000.0, drafted=5000.0),  # a proposal length that changes
    ],
)
def test_intervals_that_say_nothing(risen: Reading) -> None:
    assert point(risen, 0.0) is None


def test_few_requests_run_alone() -> None:
    found = point(replace(BUSY, at=400.0), 0.0)
    assert found is not None
    assert found.batch == 1.0


@pytest.fixture
def engines() -> Iterator[list[str]]:
    """A plain engine and one that proposes three tokens, whose load grows from reading to reading."""
    target, draft = StepTime(0.02, 0.0005), StepTime(0.002)
    servers = []
    for gamma in (0, 3):
        totals = dict.fromkeys(NAMES, 0.0)
        turn = iter(range(1, 100))

        class Metrics(BaseHTTPRequestHandler):
            def do_GET(self, totals=totals, turn=turn, gamma=gamma) -> None:  # type: ignore[no-untyped-def]
                lines = [f"{NAMES[name]} {value}\n" for name, value in totals.items()]
                self.send_response(200)
                self.end_headers()
                self.wfile.write("".join(lines).encode())
                batch = 2.0 * next(turn)
                step = target.seconds(batch, gamma) + gamma * draft.seconds(batch)
                totals["steps"] += 1000.0 * batch
                totals["latency_s"] += 1000.0 * batch * step
                if gamma:
                    totals["windows"] += 1000.0 * batch
                    totals["drafted"] += 1000.0 * batch * gamma

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
    yield [f"http://127.0.0.1:{server.server_port}" for server in servers]
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_profile_from_watching(engines: list[str]) -> None:
    found = watch(engines, seconds=1.0, interval_s=0.2)
    assert found.origin == "engine"
    assert {(timing.part, timing.gamma) for timing in found.timings} == {("target", 0), ("window", 3)}
    # How much was running follows from the wall's clock, which is this machine's; a step's time is the engine's own.
    plain = sorted(timing.seconds for timing in found.timings if not timing.gamma)
    assert plain == pytest.approx([0.02 + 0.0005 * 2 * n for n in range(1, 6)])


def test_without_speculation_there_is_no_profile(engines: list[str]) -> None:
    with pytest.raises(ProfileError, match="no engine speculated"):
        watch(engines[:1], seconds=0.2, interval_s=0.1)


def test_nobody_there() -> None:
    with pytest.raises(DriftwatchError, match=r"engine http://127.0.0.1:9/metrics"):
        watch(["http://127.0.0.1:9"], seconds=0.1)
