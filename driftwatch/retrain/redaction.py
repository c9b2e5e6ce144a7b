"""The user's own function that sees each row before it is written: to change it, or to leave it out."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from driftwatch.errors import SettingsError, StoreError

GROUP = "driftwatch.redactors"

Row = dict[str, Any]
Redactor = Callable[[Row], Row | None]


def redactor(name: str | None) -> Redactor:
    """The function of a name: an entry point, or ``module:function``. Raises SettingsError if there is none such."""
    if name is None:
        return lambda row: row
    try:
        found = [point for point in entry_points(group=GROUP) if point.name == name]
        function = found[0].load() if found else pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"`retrain.data.redact`: {name}: {error}; name module:function or an entry point of {GROUP}"
        ) from None
    if not callable(function):
        raise SettingsError(f"`retrain.data.redact`: {name} is no function; name module:function")
    return _checked(name, function)


def _checked(name: str, function: Callable[[Row], Any]) -> Redactor:
    """A function that fails, or returns what is no row, ends the export: nothing unredacted may slip through."""

    def run(row: Row) -> Row | None:
        try:
            changed = function(dict(row))
        except Exception as error:
            raise StoreError(f"`retrain.data.redact`: {name} failed on a row: {type(error).__name__}") from error
        if changed is not None and not (isinstance(changed, Mapping) and _whole(changed)):
            raise StoreError(f"`retrain.data.redact`: {name} returned no row; return the row, changed, or None")
        return None if changed is None else dict(changed)

    return run


def _whole(row: Mapping[str, Any]) -> bool:
    if "input_ids" in row:
        return len(row["input_ids"]) == len(row.get("loss_mask", ()))
    return isinstance(row.get("conversations"), list)
