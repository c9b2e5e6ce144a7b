"""The PrometheusRule: checked by promtool, its alerts run through series that raise them and series that must not.

``rules/*.yaml`` are promtool's own unit tests; they read the groups as ``rules.yaml`` beside them.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy.promql import exported, selected

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "deploy/kustomize/components/monitoring"
RULE: dict[str, Any] = yaml.safe_load((MONITORING / "rules.yaml").read_text())
GROUPS: list[dict[str, Any]] = RULE["spec"]["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
CASES = sorted((Path(__file__).parent / "rules").glob("*.yaml"))


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rules as Prometheus itself reads them, without the operator's wrapping."""
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": GROUPS}))
    return path


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=120)


def test_lint(groups: Path) -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", groups)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RULES)} rules found" in done.stdout


def test_lint_refuses_what_is_wrong(groups: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(groups.read_text().replace("sum by (model, draft)", "sum of (model, draft)"))
    assert promtool("check", "rules", "--lint=all", "--lint-fatal", wrong).returncode == 1


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_alerts_fire_and_do_not(groups: Path, case: Path) -> None:
    copy = groups.parent / case.name
    copy.write_text(case.read_text())
    done = promtool("test", "rules", copy)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_tested_both_ways() -> None:
    """Firing with its whole text, and silent while the same series are there."""
    fires: set[str] = set()
    silent: set[str] = set()
    for case in CASES:
        for test in yaml.safe_load(case.read_text())["tests"]:
            for one in test.get("alert_rule_test", []):
                (fires if one.get("exp_alerts") else silent).add(one["alertname"])
    assert fires == set(ALERTS)
    assert silent == set(ALERTS)


def test_every_name_is_exported(tmp_path: Path) -> None:
    known = exported(tmp_path) | RECORDED | {"up"}
    for rule in RULES:
        assert selected(rule["expr"]) <= known, rule.get("alert") or rule["record"]


@pytest.mark.parametrize("name", ALERTS)
def test_alerts_explain_themselves(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in {"page", "ticket"}
    assert alert["annotations"]["summary"]
    assert alert["annotations"]["description"].endswith(".")
    page, _, anchor = alert["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^### (\w+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in [heading.lower() for heading in headings]
