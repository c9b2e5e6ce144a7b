"""A sketch as a file: numpy's npz with a header in JSON. Nothing in it is pickled, so reading it runs no code.

It holds no tokens. But whoever has it can ask whether some n-gram was in the training data: keep it where that may be
known.
"""

from __future__ import annotations

import io
import json
import os
import struct
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftwatch.drift.sketch.boilerplate import Boilerplate
from driftwatch.drift.sketch.grams import Seen
from driftwatch.drift.sketch.meaning import Meaning
from driftwatch.drift.sketch.sketch import Group, Scale, Sketch
from driftwatch.errors import SketchError

FORMAT = "driftwatch-sketch"
VERSION = 1
MOST_BYTES = 256 << 20
_UNREADABLE = (
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What bytes that are no sketch make numpy and zipfile raise."""

_ARRAYS = {
    "common": ("<u8", 1),
    "seen": ("|u1", 1),
    "table": ("|i1", 2),
    "scale": ("<f2", 1),
    "weight": ("<f2", 1),
    "mean": ("<f4", 1),
    "whitening": ("<f4", 2),
    "centroids": ("<f4", 2),
    "calibration": ("<f8", 1),
    "production": ("<f8", 1),
}
"""Type and number of axes of each array."""


def encode(sketch: Sketch) -> bytes:
    """The same sketch always gives the same bytes."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "draft": sketch.draft,
        "epsilon": sketch.epsilon,
        "rows": sketch.rows,
        "scale": [group._asdict() for group in sketch.scale.groups],
    }
    meaning = sketch.meaning
    arrays = {
        "common": sketch.boilerplate.common,
        "seen": sketch.seen.bits,
        "table": meaning.table,
        "scale": meaning.scale,
        "weight": meaning.weight,
        "mean": meaning.mean,
        "whitening": meaning.whitening,
        "centroids": meaning.centroids,
        "calibration": sketch.calibration,
        "production": sketch.production,
    }
    typed: dict[str, Any] = {name: np.asarray(arrays[name], kind) for name, (kind, _) in _ARRAYS.items()}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **typed)
    return buffer.getvalue()


def decode(data: bytes, what: str) -> Sketch:
    """Inverse of :func:`encode`. Raises SketchError naming ``what`` if this is no sketch, or of another version."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            header = json.loads(stored["header"].tobytes())
            if header["format"] != FORMAT:
                raise ValueError(f"its format is {header['format']!r}")
            if header["version"] != VERSION:
                raise SketchError(
                    f"{what}: a sketch of version {header['version']}, this reads {VERSION}: build it anew"
                )
            return _sketch(header, {name: _array(stored, name) for name in _ARRAYS})
    except _UNREADABLE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SketchError(f"{what}: not a sketch ({reason}); make one with `driftwatch sketch build`") from None


def _array(stored: Mapping[str, NDArray[Any]], name: str) -> NDArray[Any]:
    kind, axes = _ARRAYS[name]
    array = stored[name]
    if array.dtype != np.dtype(kind) or array.ndim != axes:
        raise ValueError(f"its array {name} is {array.dtype} with {array.ndim} axes")
    return array


def _sketch(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Sketch:
    names = ("table", "scale", "weight", "mean", "whitening", "centroids")
    meaning = Meaning(**{name: arrays[name] for name in names})
    vocabulary, dimensions = meaning.table.shape
    fits = (
        meaning.scale.shape == meaning.weight.shape == (vocabulary,)
        and meaning.mean.shape == (dimensions,)
        and meaning.whitening.shape == (dimensions, dimensions)
        and meaning.centroids.shape[0] > 0
        and meaning.centroids.shape[1] == dimensions
    )
    bits = len(arrays["seen"])
    if not fits or bits == 0 or bits & (bits - 1) or not len(arrays["calibration"]) or not header["scale"]:
        raise ValueError("its arrays do not fit each other")
    epsilon = float(header["epsilon"])
    if not 0.0 < epsilon < 1.0:
        raise ValueError(f"its epsilon is {epsilon}")
    return Sketch(
        draft=str(header["draft"]),
        epsilon=epsilon,
        rows=int(header["rows"]),
        boilerplate=Boilerplate(arrays["common"]),
        seen=Seen(arrays["seen"]),
        meaning=meaning,
        scale=Scale(tuple(map(_group, header["scale"]))),
        calibration=arrays["calibration"],
        production=arrays["production"],
    )


def _group(said: Mapping[str, Any]) -> Group:
    (distance, novelty), (a, b) = said["mean"], said["spread"]
    if not (a > 0.0 and b > 0.0):
        raise ValueError("its scale is not positive")
    return Group(float(said["tokens"]), (float(distance), float(novelty)), (float(a), float(b)))


def read(path: Path) -> Sketch:
    """Read a sketch. Raises SketchError if it cannot be read."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise SketchError(f"sketch {path}: over {MOST_BYTES >> 20} MiB, so not a sketch")
        return decode(path.read_bytes(), f"sketch {path}")
    except OSError as error:
        raise SketchError(
            f"sketch {path}: {error.strerror or error}; make one with `driftwatch sketch build`"
        ) from None


def write(path: Path, sketch: Sketch) -> int:
    """Write a sketch, whole or not at all; its bytes. Raises SketchError if the place cannot be written."""
    data = encode(sketch)
    try:
        handle, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as opened:
                opened.write(data)
            Path(scratch).chmod(0o644)
            Path(scratch).replace(path)
        finally:
            Path(scratch).unlink(missing_ok=True)
    except OSError as error:
        raise SketchError(f"sketch {path}: {error.strerror or error}; name a file that may be written") from None
    return len(data)


def read_for(path: Path, draft: str) -> Sketch:
    """Read the sketch of the draft with this fingerprint. Raises SketchError if it belongs to another one."""
    sketch = read(path)
    if sketch.draft != draft:
        raise SketchError(
            f"sketch {path} belongs to draft {sketch.draft[:12]}, this draft is {draft[:12]}: build one for it"
        )
    return sketch
