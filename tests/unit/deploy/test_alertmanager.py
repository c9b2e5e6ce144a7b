"""The Alertmanager example: accepted by amtool, and every alert of ours has its way to a receiver."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy.test_rules import ALERTS

FILE = Path(__file__).parents[3] / "deploy/alertmanager.yaml"
CONFIG: dict[str, Any] = yaml.safe_load(FILE.read_text())


def amtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["amtool", *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_amtool_accepts_it() -> None:
    done = amtool("check-config", FILE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 receivers" in done.stdout


def test_amtool_refuses_a_receiver_that_is_not_there(tmp_path: Path) -> None:
    wrong = tmp_path / "alertmanager.yaml"
    wrong.write_text(FILE.read_text().replace("receiver: pages", "receiver: pagers"))
    assert amtool("check-config", wrong).returncode == 1


@pytest.mark.parametrize(("severity", "receiver"), [("page", "pages"), ("ticket", "tickets")])
def test_routes(severity: str, receiver: str) -> None:
    done = amtool("config", "routes", "test", f"--config.file={FILE}", f"severity={severity}", "alertname=any")
    assert done.stdout.split() == [receiver]


def test_what_is_inhibited_exists() -> None:
    matchers = [m for rule in CONFIG["inhibit_rules"] for m in rule["source_matchers"] + rule["target_matchers"]]
    named = {name for matcher in matchers for name in re.findall(r"Driftwatch\w+", matcher)}
    assert named
    assert named <= set(ALERTS)
