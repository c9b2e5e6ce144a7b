"""Files that commands write: whole under their name, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from driftwatch.errors import DriftwatchError


@contextmanager
def written_whole(option: str, path: Path | None, read: Sequence[Path] = ()) -> Iterator[IO[str] | None]:
    """A text file that appears under its name only when the block ends well; none of those that are ``read``.

    Raises DriftwatchError at once, before the work of the block, if it cannot be written.
    """
    if path is None:
        yield None
        return
    if path.exists() and not path.is_file():
        raise DriftwatchError(f"{option} {path}: not a file; name one that may be written")
    if path.exists() and any(other.exists() and path.samefile(other) for other in read):
        raise DriftwatchError(f"{option} {path}: the records are read from it; name another file")
    scratch = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        file = scratch.open("x", encoding="utf-8")
    except OSError as error:
        raise DriftwatchError(f"{option} {path}: {error.strerror or error}; name a file that may be written") from None
    try:
        with file:
            yield file
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
