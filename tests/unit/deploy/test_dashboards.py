"""The dashboards: the committed files are what the generator writes, and keep Grafana's own schema and our rules."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.unit.deploy.promql import exported, selected

DASHBOARDS = Path(__file__).parents[3] / "dashboards"
SCHEMA = json.loads((Path(__file__).parents[2] / "data/grafana/dashboard-11.6.0.schema.json").read_text())
FILES = sorted(DASHBOARDS.glob("*.json"))


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", [])


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(request.param.read_text())
    return loaded


def test_committed_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(DASHBOARDS / "generate.py"), str(tmp_path)], check=True)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in FILES}
    for path in FILES:
        assert path.read_text() == (tmp_path / path.name).read_text(), "run `python dashboards/generate.py`"


def test_identities(dashboard: dict[str, Any]) -> None:
    assert dashboard["uid"].startswith("driftwatch-")
    assert dashboard.get("id") is None
    assert dashboard["description"]
    ids = [panel["id"] for panel in panels(dashboard)]
    assert len(set(ids)) == len(ids)


def test_no_magic_data_source(dashboard: dict[str, Any]) -> None:
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert "datasource" in names
    for panel in panels(dashboard):
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


def queries(dashboard: dict[str, Any]) -> Iterator[str]:
    """PromQL of panels and annotations, as Grafana sends it with "All" chosen."""
    targets = [target for panel in panels(dashboard) for target in panel.get("targets", [])]
    for query in (*targets, *dashboard["annotations"]["list"]):
        yield re.sub(r"\$(model|draft|segment|split)\b", ".*", query["expr"].replace("$__rate_interval", "5m"))


def test_every_name_is_exported(dashboard: dict[str, Any], names: set[str]) -> None:
    found = list(queries(dashboard))
    assert found
    for query in found:
        assert selected(query) <= names


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return exported(tmp_path_factory.mktemp("names"))


def test_config_maps_for_grafanas_sidecar() -> None:
    done = subprocess.run(["kubectl", "kustomize", str(DASHBOARDS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    maps = list(yaml.safe_load_all(done.stdout))
    assert sorted(name for one in maps for name in one["data"]) == [path.name for path in FILES]
    for one in maps:
        assert (one["kind"], one["metadata"]["labels"]) == ("ConfigMap", {"grafana_dashboard": "1"})
        assert one["metadata"]["annotations"] == {"grafana_folder": "driftwatch"}
        for name, text in one["data"].items():
            assert json.loads(text) == json.loads((DASHBOARDS / name).read_text())
        assert len(json.dumps(one)) < 1 << 20, "the limit of a ConfigMap"


def test_panels_explain_themselves(dashboard: dict[str, Any]) -> None:
    for panel in panels(dashboard):
        if panel["type"] != "row":
            assert panel["description"].endswith(".")
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"]


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels(dashboard)], 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels(dashboard))


def test_grafanas_own_schema(dashboard: dict[str, Any]) -> None:
    """Made from the types that Grafana 11.6 publishes; each panel apart, for readable errors."""
    for panel in panels(dashboard):
        kind = "RowPanel" if panel["type"] == "row" else "Panel"
        errors = [error.message for error in validator(f"#/definitions/{kind}").iter_errors(panel)]
        assert not errors, panel["title"]
    for annotation in dashboard["annotations"]["list"]:
        assert annotation.pop("expr"), "the data source's own key, which the types of all dashboards do not know"
    whole = [error.message for error in validator("#/definitions/Dashboard").iter_errors(dashboard)]
    assert not whole


@pytest.mark.parametrize(
    ("where", "value"),
    [("unknown", 1), ("gridPos", {"h": "8"}), ("fieldConfig", {"defaults": {"thresholds": {"mode": "relative"}}})],
)
def test_the_schema_refuses_what_is_wrong(where: str, value: object) -> None:
    panel = json.loads((DASHBOARDS / "overview.json").read_text())["panels"][1]
    assert validator("#/definitions/Panel").is_valid(panel)
    assert not validator("#/definitions/Panel").is_valid(panel | {where: value})


def validator(reference: str) -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator({"$ref": reference, "definitions": SCHEMA["definitions"]})
