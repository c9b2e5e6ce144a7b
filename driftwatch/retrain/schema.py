"""The published JSON Schemas of what is announced: one file a type and version, beside this module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator

VERSION = 1


def dataschema(type: str) -> str:
    """The name of the schema of a type, as events carry it."""
    return f"urn:driftwatch:{type}:{VERSION}"


@cache
def published(type: str) -> dict[str, Any]:
    """The schema of a type's whole event. Raises FileNotFoundError for a type that has none."""
    name = f"{type.removeprefix('driftwatch.')}.{VERSION}.json"
    found: dict[str, Any] = json.loads((files("driftwatch.retrain") / "schemas" / name).read_text())
    return found


@cache
def _validator(type: str) -> Draft202012Validator:
    return Draft202012Validator(published(type))


def misfit(event: Mapping[str, Any]) -> str | None:
    """What is wrong with an event in the eyes of its schema; None if nothing is."""
    try:
        validator = _validator(event["type"])
    except FileNotFoundError:
        return "no schema is published for its type"
    error = next(iter(validator.iter_errors(event)), None)
    return None if error is None else f"{error.json_path}: {error.message[:200]}"
