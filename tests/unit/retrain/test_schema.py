"""What is announced fits the schemas that are published, and the schemas say something."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from driftwatch.retrain import announce
from driftwatch.retrain.schema import dataschema, misfit, published

TYPES = sorted(value for name, value in vars(announce).items() if name.isupper() and "driftwatch." in str(value))


def event(type: str, data: dict[str, Any]) -> dict[str, Any]:
    return {
        "specversion": "1.0",
        "id": "e1",
        "source": "/driftwatch/control",
        "type": type,
        "subject": "tenant=a",
        "time": "2026-01-01T00:00:00Z",
        "datacontenttype": "application/json",
        "dataschema": dataschema(type),
        "data": data,
    }


@pytest.mark.parametrize("type", TYPES)
def test_every_type_has_a_schema_that_is_one(type: str) -> None:
    schema = published(type)
    Draft202012Validator.check_schema(schema)
    assert schema["$id"] == dataschema(type)
    assert misfit(event(type, {})) is not None


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"id": ""}, "$.id"),
        ({"specversion": "0.3"}, "$.specversion"),
        ({"data": {"event_id": 1}}, "$.data.event_id"),
        ({"data": {"event_id": "x", "split": "sideways"}}, "$.data.split"),
        ({"data": {"event_id": "x", "current": {"value": 1}}}, "$.data.current"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], wrong: str) -> None:
    good = event(announce.DRIFT_OPENED, {"event_id": "x"})
    assert misfit(good) is None
    assert (misfit(good | change) or "").startswith(wrong)


def test_a_type_without_a_schema_is_a_misfit_and_no_crash() -> None:
    assert misfit(event("driftwatch.nothing.happened", {})) == "no schema is published for its type"


def test_more_fields_are_no_misfit() -> None:
    assert misfit(event(announce.DRIFT_OPENED, {"event_id": "x", "news": json.loads("[1]")}) | {"more": 1}) is None
