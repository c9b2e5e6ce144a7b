"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from driftwatch.errors import DriftwatchError
from driftwatch.settings import HiddenStates, load

files = click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))


def _engine(context: click.Context, option: click.Parameter, value: str | None) -> HiddenStates | None:
    try:
        return None if value is None else HiddenStates.model_validate_json(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "the value"
        raise DriftwatchError(f"--hidden-states: {key}: {first['msg']}") from None


hidden_states = click.option(
    "--hidden-states",
    "engine",
    callback=_engine,
    metavar="JSON",
    help="An engine that runs the target for an EAGLE-3 draft, where it is too large for this machine: "
    '{"url": "http://127.0.0.1:8001", "layers": [2, 16, 29], "folder": "/dev/shm/hs"}, as the settings have it.',
)


def with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --config, and the settings in its place. The lowest decorator of a command."""

    @click.option(
        "--config", type=click.Path(path_type=Path), help="Settings file (YAML); else environment and defaults."
    )
    @wraps(command)
    def wrapped(config: Path | None, **options: Any) -> Any:
        return command(settings=load(config), **options)

    return wrapped


def needs_shadow(error: ModuleNotFoundError) -> DriftwatchError:
    """torch and transformers are an extra."""
    return DriftwatchError(f"this needs {error.name}, which is not installed: pip install 'driftwatch-sidecar[shadow]'")
