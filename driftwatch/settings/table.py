"""The README's table of settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import (
    BaseModel,
)
from pydantic.fields import FieldInfo

from driftwatch.settings.whole import Settings


def leaves(section: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key with its dotted name, lists as ``models[].name``."""
    for name, field in section.model_fields.items():
        annotation: Any = field.annotation
        is_list = get_origin(annotation) is list
        inner = next(iter(get_args(annotation)), annotation)  # of a list, or of what may be left out
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner, f"{prefix}{name}{'[]' if is_list else ''}.")
        else:
            yield prefix + name, field


def reference() -> str:
    """The README's table of settings, in Markdown."""
    rows = ["| key | default | meaning |", "| --- | --- | --- |"]
    for key, field in leaves():
        default = "required" if field.is_required() else f"`{_plain(field.default)}`"
        rows.append(f"| `{key}` | {default} | {field.description} |")
    return "\n".join(rows)


def _plain(value: Any) -> str:
    return json.dumps(value, default=str).strip('"')
