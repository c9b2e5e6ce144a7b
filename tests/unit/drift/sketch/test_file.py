"""A sketch survives its file to the bit; what is none, or another's, is refused in one line."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftwatch.drift.sketch import file
from driftwatch.drift.sketch.build import build
from driftwatch.drift.sketch.sketch import Sketch
from driftwatch.errors import SketchError
from tests.unit.drift.sketch.conftest import rows

DRAFT = "ab" * 32


def made(seed: int, epsilon: float = 0.05, production: int = 0) -> Sketch:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 300, rng.integers(1, 40)) for _ in range(130 + production)]
    sample = rows(prompts[130:]) if production else None
    embedding = rng.normal(size=(250, 24)).astype(np.float32)  # some ids lie outside
    return build(rows(prompts[:130]), embedding, draft=DRAFT, epsilon=epsilon, production=sample)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.04, 0.5), st.sampled_from([0, 60]), st.lists(st.integers(0, 400)))
def test_round_trip(seed: int, epsilon: float, production: int, prompt: list[int]) -> None:
    sketch = made(seed, epsilon, production)
    data = file.encode(sketch)
    again = file.decode(data, "x")
    assert file.encode(again) == data
    assert again.score([prompt, [1]]) == sketch.score([prompt, [1]])
    assert (again.draft, again.epsilon, again.rows) == (DRAFT, epsilon, sketch.rows)
    assert (again.off_rate, again.production_off) == (sketch.off_rate, sketch.production_off)


BAD_SCALE = [{"tokens": 9, "mean": [0, 0], "spread": [0, 1]}]


def rewritten(**changes: Any) -> bytes:
    """A good sketch's file with other header fields or arrays."""
    with np.load(io.BytesIO(file.encode(made(0)))) as stored:
        arrays = {name: stored[name] for name in stored.files}
    header = json.loads(arrays["header"].tobytes())
    header |= {key: value for key, value in changes.items() if key in header}
    arrays |= {key: value for key, value in changes.items() if key not in header}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def test_what_is_no_sketch_is_refused() -> None:
    assert file.decode(rewritten(), "x").draft == DRAFT
    whole = rewritten()
    bad = [b"", b"{}", b"PK\x03\x04", whole[:2000], whole[:-40], rewritten(format="other"), rewritten(epsilon=1.5)]
    bad += [rewritten(table=np.zeros((2, 2), np.int8)), rewritten(seen=np.zeros(3, np.uint8))]
    bad += [
        rewritten(calibration=np.zeros(0)),
        rewritten(mean=np.zeros(8)),
        rewritten(scale=[]),
        rewritten(scale=BAD_SCALE),
    ]
    for data in bad:
        with pytest.raises(SketchError, match=r"^x: not a sketch \(.*\); make one with") as refused:
            file.decode(data, "x")
        assert "\n" not in str(refused.value)


def test_pickles_are_not_read() -> None:
    with pytest.raises(SketchError, match="not a sketch"):
        file.decode(rewritten(common=np.array([{}], object)), "x")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damage_is_found_or_harmless(data: st.DataObject) -> None:
    whole = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        file.decode(bytes(whole), "x")
    except SketchError as error:
        assert "\n" not in str(error)  # noqa: PT017  (both ends are right)


WHOLE = file.encode(made(1))


def test_a_damaged_header_of_a_large_array_is_found() -> None:
    """numpy reads it as Python's own text, before anybody has seen the checksum; on a second try token by token."""
    whole = rewritten()
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        largest = max(archive.infolist(), key=lambda member: member.file_size)
    end = whole.index(b"), }", largest.header_offset)
    for bad in (b"(, }", b") 0 "):
        with pytest.raises(SketchError, match="not a sketch"):
            file.decode(whole[:end] + bad + whole[end + 4 :], "x")


def test_another_version_says_so() -> None:
    with pytest.raises(SketchError, match="a sketch of version 2, this reads 1: build it anew"):
        file.decode(rewritten(version=2), "x")


def test_a_sketch_of_another_draft_is_refused_naming_both(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    sketch = replace(made(0), draft=DRAFT)
    assert file.write(path, sketch) == path.stat().st_size
    assert file.read_for(path, DRAFT).rows == sketch.rows
    with pytest.raises(SketchError, match="belongs to draft abababababab, this draft is cdcdcdcdcdcd"):
        file.read_for(path, "cd" * 32)


def test_places_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(SketchError, match="No such file"):
        file.read(tmp_path / "none.npz")
    with pytest.raises(SketchError, match="No such file"):
        file.write(tmp_path / "no" / "s.npz", made(0))
    (tmp_path / "folder").mkdir()
    with pytest.raises(SketchError, match="directory"):
        file.write(tmp_path / "folder", made(0))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
