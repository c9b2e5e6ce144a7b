"""Live-only: no draft, no GPU, no shadow process. The engine's own figures go through tap and control to a webhook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.machine import Machine, completion, prompts, until
from tests.receiving import Receiver, receiving


def send(machine: Machine, records: list[dict[str, Any]], *, stream: bool) -> None:
    with httpx.Client(base_url=machine.tap, timeout=60, trust_env=False) as client:
        for record in records:
            body = completion(record, stream=stream)
            answer = client.post("/v1/completions", json=body, headers={"x-tenant": "a"})
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("stream", [True, False])
def test_an_engines_own_figures_alone_raise_the_alarm(tmp_path: Path, stream: bool) -> None:
    with receiving() as hook:
        fall(tmp_path, hook, stream)


def fall(tmp_path: Path, hook: Receiver, stream: bool) -> None:
    machine = Machine(
        tmp_path,
        models=[{"name": "*", "drafts": [{"name": "incumbent"}], "gamma": 3}],
        detect={
            "baseline": {"min_requests": 30, "min_hours": 0},
            "tolerance": 0.15,
            "requests_between_false_alarms": 1000,
        },
        webhooks=[{"name": "hook", "url": hook.url, "events": ["*.opened"]}],
        retrain={"export_dir": str(tmp_path / "exports")},
    )
    settings = machine.config.read_text().replace("engine:\n", "engine:\n  metrics_interval_s: 0.2\n")
    machine.config.write_text(settings)
    try:
        machine.start_engine()
        machine.start("serve")
        machine.wait_for(f"{machine.admin}/readyz")
        machine.wait_for(f"{machine.control}/readyz")
        machine.wait_for_engine("serve")
        assert "shadow runs" not in machine.log("serve")
        until(lambda: "driftwatch_live_engine_windows_total" in machine.metrics(machine.admin))
        records = prompts()
        sent = [one for domain in "AB" for one in records if one["labels"]["domain"] == domain for _ in range(2)]
        send(machine, sent[:72], stream=stream)
        until(lambda: machine.metrics().get("driftwatch_live_requests_total") == 72)
        send(machine, sent[72:], stream=stream)
        found = until(lambda: (m := machine.metrics()).get("driftwatch_live_requests_total") == 144 and m)
        expected = {
            "windows": sum(one["engine"]["windows"] for one in sent),
            "drafted_tokens": sum(one["engine"]["drafted"] for one in sent),
            "accepted_tokens": sum(one["engine"]["accepted"] for one in sent),
        }
        assert {name: found[f"driftwatch_live_{name}_total"] for name in expected} == expected
        scraped = {f"driftwatch_live_engine_{name}_total": count for name, count in expected.items()}
        until(lambda: scraped.items() <= machine.metrics(machine.admin).items())
        assert not any(name.startswith("driftwatch_shadow_windows") for name in found)
        until(lambda: [event["type"] for event in hook.events] == ["driftwatch.drift.opened"])
        (event,) = httpx.get(f"{machine.control}/v1/events").json()["events"]
        assert (event["channel"], event["details"]["metric"]) == ("live", "hit_rate")
        (retrain,) = until(
            lambda: [r for r in httpx.get(f"{machine.control}/v1/retrains").json()["retrains"] if r["data"]]
        )
        assert retrain["data"]["rows"] > 0
    finally:
        machine.stop()
