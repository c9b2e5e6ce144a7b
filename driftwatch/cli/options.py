"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from driftwatch.errors import DriftwatchError
from driftwatch.settings import load

files = click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))


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
