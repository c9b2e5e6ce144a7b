"""config.json of a draft, read key by key: a value of the wrong kind is one line that names it, never a traceback."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from driftwatch.errors import ModelError


class Config:
    """An object of config.json; ``what`` names the draft in errors. A null counts as absent, as trainers write it."""

    def __init__(self, values: Mapping[str, Any], what: str) -> None:
        self.what = what
        self._values = {key: value for key, value in values.items() if value is not None}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Any:
        """As it is written, whatever it is."""
        return self._values.get(key)

    @property
    def architecture(self) -> str:
        """The first that is named; empty if none is."""
        named = self.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else ""

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number. Raises ModelError if it is something else, or absent without a default."""
        value = self._values.get(key, default)
        if not _is_whole(value) or value < 1:
            raise self._wrong(key, value, "a positive number")
        return value

    def index(self, key: str) -> int | None:
        """A whole number from 0 on. Raises ModelError if it is something else."""
        value = self.get(key)
        if value is None or (_is_whole(value) and value >= 0):
            return value
        raise self._wrong(key, value, "a number from 0 on")

    def indices(self, key: str) -> tuple[int, ...] | None:
        """Whole numbers from 0 on, at least one. Raises ModelError if it is something else."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not value or not all(_is_whole(one) and one >= 0 for one in value):
            raise self._wrong(key, value, "a list of numbers from 0 on")
        return tuple(value)

    def real(self, key: str, default: float) -> float:
        """A positive, finite number. Raises ModelError if it is something else."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false. Raises ModelError if it is something else."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def choice(self, key: str, default: str, known: Collection[str]) -> str:
        """One of the names that are known. Raises ModelError if it is something else."""
        value = self._values.get(key, default)
        if not isinstance(value, str) or value not in known:
            raise self._wrong(key, value, "known here")
        return value

    def part(self, key: str) -> Config:
        """An object in it; an empty one if absent. Raises ModelError if it is something else."""
        value = self._values.get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return Config(value, self.what)

    def without(self, *keys: str) -> dict[str, Any]:
        """What else there is, as it is written."""
        return {key: value for key, value in self._values.items() if key not in keys}

    def _wrong(self, key: str, value: Any, wanted: str) -> ModelError:
        told = repr(value)
        told = told if len(told) <= 60 else f"{told[:57]}..."
        return ModelError(f"{self.what}: config.json: {key} is {told}, not {wanted}")


def read_config(folder: Path) -> Config:
    """config.json of a draft's checkpoint folder. Raises ModelError if it is not there or not JSON."""
    what = f"draft {folder}"
    if not folder.is_dir():
        raise ModelError(f"{what}: no such folder; give a folder with config.json and safetensors")
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"{what}: {path.name}: {error.strerror or error}; is it a checkpoint folder?") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{what}: config.json is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ModelError(f"{what}: config.json must hold an object")
    return Config(values, what)


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
