"""The demo, with shortened traffic: a drift event after the shift and none before it; none at all without a shift; and
the loop closed by a pipeline that trains the draft further.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

REQUESTS = 120


def demo(*options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "driftwatch", "demo", "--json", "--requests", str(REQUESTS), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1500, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def cell(report: dict[str, Any], segment: str, period: str) -> dict[str, Any]:
    """Of a report, or of the candidate in it."""
    (found,) = [one for one in report["cells"] if (one["segment"], one["period"]) == (segment, period)]
    return dict(found)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_shift_is_found_and_only_it(seed: int) -> None:
    report = demo("--seed", str(seed))
    assert report["requests"] == report["samples"] == REQUESTS
    assert report["replays"] >= REQUESTS - 5
    (event,) = report["events"]
    assert (event["kind"], event["segment"]) == ("drift", "tenant=acme")
    assert event["index"] > report["shift_index"]
    assert {(hook["type"], hook["verified"]) for hook in report["webhooks"]} == {
        ("driftwatch.drift.opened", True),
        ("driftwatch.retrain.requested", True),
    }
    before, after = cell(report, "tenant=acme", "before"), cell(report, "tenant=acme", "after")
    assert after["upper"] < before["lower"] - 0.3
    steady = cell(report, "tenant=globex", "before"), cell(report, "tenant=globex", "after")
    assert steady[0]["lower"] < steady[1]["upper"]
    (uri,) = report["exports"]
    rows = [json.loads(line) for line in Path(urlparse(uri).path).read_text().splitlines()]
    assert len(rows) >= 5
    for row in rows:
        assert len(row["input_ids"]) == len(row["loss_mask"])
        assert 0 < sum(row["loss_mask"]) < len(row["loss_mask"])


@pytest.mark.timeout(900)
def test_without_a_shift_nothing_fires() -> None:
    report = demo("--seed", "4", "--no-shift")
    assert report["shift_index"] is None
    assert (report["events"], report["webhooks"], report["exports"]) == ([], [], [])
    assert report["replays"] >= REQUESTS - 5


@pytest.mark.timeout(1800)
def test_with_a_pipeline_the_draft_learns_the_new_traffic_and_keeps_the_old() -> None:
    """Whether it is promoted rests with the gate, whose intervals on some hundred requests are what they are."""
    report = demo("--seed", "3", "--retrain")
    assert report["requests"] == report["samples"] > REQUESTS
    (event,) = report["events"]
    assert (event["segment"], event["kind"]) == ("tenant=acme", "drift")
    announced = {hook["type"] for hook in report["webhooks"] if hook["verified"]}
    assert {"driftwatch.retrain.requested", "driftwatch.candidate.verdict"} <= announced
    candidate = report["candidate"]
    assert candidate["retrain"] in ("promoted", "rejected")
    assert candidate["rows"] >= 60
    learnt, before = cell(candidate, "tenant=acme", "after"), cell(report, "tenant=acme", "after")
    assert learnt["lower"] > before["upper"]
    kept, was = (cell(one, "tenant=globex", "after") for one in (candidate, report))
    assert kept["upper"] > was["lower"] - 0.1
    (gain,) = [row for row in candidate["verdict"]["table"] if row["segment"] == "tenant=acme"]
    assert gain["lower"] > 0.02


def test_a_pipeline_without_a_shift_is_wrong_use() -> None:
    command = [sys.executable, "-m", "driftwatch", "demo", "--retrain", "--no-shift"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "--retrain needs the shift" in done.stderr
