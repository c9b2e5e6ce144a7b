"""Putting a folder in its place, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from driftwatch.errors import StoreError
from driftwatch.retrain.publish import publish, remove, uri


def write(folder: Path) -> str:
    (folder / "manifest.json").write_text("{}")
    (folder / "train.jsonl").write_text("1\n")
    return "done"


def fail(folder: Path) -> None:
    (folder / "train.jsonl").write_text("half")
    raise StoreError("no")


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "a" / "out") if request.param == "folder" else f"memory://{tmp_path.name}/out"


def names(place: str) -> list[str]:
    files, path = fsspec.core.url_to_fs(place)
    return sorted(name.rpartition("/")[2] for name in files.ls(path, detail=False)) if files.exists(path) else []


def test_what_is_written_appears_and_goes_as_a_whole(place: str) -> None:
    assert publish(place, write) == "done"
    assert names(place) == ["manifest.json", "train.jsonl"]
    with fsspec.open(uri(place, "train.jsonl")) as file:
        assert file.read() == b"1\n"
    remove(place)
    assert names(place) == []
    remove(place)  # twice is no error


def test_what_fails_leaves_what_was_there(place: str) -> None:
    publish(place, write)
    with pytest.raises(StoreError, match="^no$"):
        publish(place, fail)
    assert names(place) == ["manifest.json", "train.jsonl"]


def test_what_lay_there_before_is_replaced(place: str) -> None:
    def other(folder: Path) -> None:
        (folder / "manifest.json").write_text("{}")

    publish(place, write)
    publish(place, other)
    assert names(place) == ["manifest.json"]


def test_nothing_half_written_is_left_beside_it(tmp_path: Path) -> None:
    (tmp_path / ".out-12345678").mkdir()
    (tmp_path / ".out-12345678" / "train.jsonl").write_text("somebody's words")
    with pytest.raises(StoreError):
        publish(str(tmp_path / "out"), fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["nosuch://x", "/proc/nothing/out"])
def test_a_place_that_cannot_be_written_is_one_line(place: str) -> None:
    with pytest.raises(StoreError, match="nothing can be written to ") as caught:
        publish(place, write)
    assert "\n" not in str(caught.value)
