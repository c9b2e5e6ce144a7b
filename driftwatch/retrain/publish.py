"""Putting a finished folder where it is to lie, whole or not at all: on this machine, or wherever fsspec reaches."""

from __future__ import annotations

import glob
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from driftwatch.errors import StoreError

T = TypeVar("T")

LAST = "manifest.json"
"""An object store renames no folder: there, what has this file is complete."""
RANDOM = 8
"""Characters that tempfile.mkdtemp adds to a prefix."""


def publish(place: str, write: Callable[[Path], T]) -> T:
    """Let ``write`` fill a scratch folder, then put that at ``place``; what lay there is replaced.

    Raises StoreError if it cannot be written there.
    """
    try:
        files, path = fsspec.core.url_to_fs(place)
        if _is_local(files):
            return _beside(Path(path), write)
        mine = hashlib.sha256(place.encode()).hexdigest()[:16]
        with _scratch(Path(tempfile.gettempdir()), f"driftwatch-{mine}-") as scratch:
            done = write(scratch)
            remove(place)
            written = (file for file in scratch.rglob("*") if file.is_file())
            for file in sorted(written, key=lambda file: file.name == LAST):
                there = f"{path}/{file.relative_to(scratch).as_posix()}"
                files.makedirs(there.rpartition("/")[0], exist_ok=True)
                files.put_file(str(file), there)
            return done
    except ImportError as error:
        raise StoreError(f"nothing can be written to {place}: {error}; install that package") from None
    except (OSError, ValueError) as error:
        raise StoreError(
            f"nothing can be written to {place}: {_reason(error)}; name another place (retrain.export_dir)"
        ) from error


def _beside(folder: Path, write: Callable[[Path], T]) -> T:
    """On the same file system, so that it appears by one rename."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _scratch(folder.parent, f".{folder.name}-") as scratch:
        done = write(scratch)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
        return done


@contextmanager
def _scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """An empty folder. Gone at the end, and so are those of runs for the same place that died: people's words lie in
    them."""
    for left in parent.glob(glob.escape(prefix) + "?" * RANDOM):
        shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def exists(place: str) -> bool:
    """Whether something lies at a place. Raises StoreError where nobody can tell."""
    try:
        files, path = fsspec.core.url_to_fs(place)
        return bool(files.exists(path))
    except ImportError as error:
        raise StoreError(f"{place}: {error}; install that package") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{place}: {_reason(error)}") from error


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
