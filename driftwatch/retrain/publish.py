"""Putting a finished folder where it is to lie, whole or not at all: on this machine, or wherever fsspec reaches."""

from __future__ import annotations

import glob
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from driftwatch.errors import StoreError

T = TypeVar("T")

LAST = "manifest.json"
"""An object store renames no folder: there, what has this file is complete."""


def publish(place: str, write: Callable[[Path], T]) -> T:
    """Let ``write`` fill a scratch folder, then put that at ``place``; what lay there is replaced.

    Raises StoreError if it cannot be written there.
    """
    try:
        files, path = fsspec.core.url_to_fs(place)
        if _is_local(files):
            return _beside(Path(path), write)
        with tempfile.TemporaryDirectory(prefix="driftwatch-export-") as scratch:
            done = write(Path(scratch))
            remove(place)
            files.makedirs(path, exist_ok=True)
            names = sorted((one.name for one in Path(scratch).iterdir()), key=lambda name: name == LAST)
            for name in names:
                files.put_file(str(Path(scratch) / name), f"{path}/{name}")
            return done
    except ImportError as error:
        raise StoreError(f"`retrain.export_dir`: {place}: {error}; install that package") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"`retrain.export_dir`: {place}: {_reason(error)}") from error


def _beside(folder: Path, write: Callable[[Path], T]) -> T:
    """On the same file system, so that it appears by one rename."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{glob.escape(folder.name)}-*"):  # by a run that died: it holds what people wrote
        shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        done = write(scratch)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
        return done
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def remove(place: str) -> None:
    """Delete what lies at a place, the mark of completeness first. Raises StoreError if it cannot."""
    try:
        files, path = fsspec.core.url_to_fs(place)
        if files.exists(f"{path}/{LAST}"):
            files.rm_file(f"{path}/{LAST}")
        if files.exists(path):
            files.rm(path, recursive=True)
    except OSError as error:
        raise StoreError(f"{place}: {_reason(error)}") from error


def uri(place: str, name: str) -> str:
    """URI of a file at a place."""
    files, path = fsspec.core.url_to_fs(place)
    if _is_local(files):
        return (Path(path) / name).absolute().as_uri()
    return str(files.unstrip_protocol(f"{path}/{name}"))


def _is_local(files: Any) -> bool:
    protocol = files.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
