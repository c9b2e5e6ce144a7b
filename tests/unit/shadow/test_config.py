"""A value of the wrong kind anywhere in config.json is one line that names draft and key, for every kind of draft."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from driftwatch.errors import ModelError
from driftwatch.shadow.config import Config, read_config
from driftwatch.shadow.open import Opening, open_draft
from driftwatch.shadow.target import Target

from .conftest import CPU, DATA

NONSENSE: tuple[Any, ...] = (None, "x", -1, 0, [], {}, 3.7, True, [None], ["x"], [-5, 0, 1])
KINDS = ("eagle3", "dflash", "domino", "peagle")


def places(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for key in list(config):
        yield config, key
        if isinstance(config[key], dict):
            yield from places(config[key])


def copied(kind: str, folder: Path) -> dict[str, Any]:
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(DATA / "models" / kind / name, folder / name)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize("kind", KINDS)
def test_nonsense_never_ends_in_a_traceback(kind: str, target: Target, tmp_path: Path) -> None:
    config = copied(kind, tmp_path)
    opening = Opening(CPU, torch.float32, depths=2)
    refused: list[str] = []
    tried = 0
    for part, key in places(config):
        good = part[key]
        for value in NONSENSE:
            part[key] = value
            (tmp_path / "config.json").write_text(json.dumps(config))
            tried += 1
            try:
                open_draft(tmp_path, opening, target)
            except ModelError as error:
                refused.append(str(error))
        part[key] = good
    assert len(refused) > tried / 3
    assert not [message for message in refused if "\n" in message]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(kind: str, value: float, target: Target, tmp_path: Path) -> None:
    copied(kind, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("o_proj.weight"))
    tensors[name][0, 0] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"tensor {name} holds NaN or infinity"):
        open_draft(tmp_path, Opening(CPU, torch.float32), target)
    save_file(tensors | {name: tensors[name].nan_to_num(0).to(torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{name} is quantised \(torch.int8\)"):
        open_draft(tmp_path, Opening(CPU, torch.float32), target)


def test_what_is_read_is_what_is_written() -> None:
    config = Config(
        {"n": 3, "x": 0.5, "yes": True, "ids": [0, 2], "part": {"m": 1}, "none": None, "big": 2**80}, "draft d"
    )
    assert (config.count("n"), config.count("none", 7), config.index("n"), config.index("none")) == (3, 7, 3, None)
    assert (config.real("x", 1.0), config.real("n", 1.0), config.real("none", 2.0)) == (0.5, 3.0, 2.0)
    assert (config.flag("yes"), config.flag("none"), config.flag("none", True)) == (True, False, True)
    assert (config.indices("ids"), config.indices("none")) == ((0, 2), None)
    assert (config.part("part").count("m"), config.part("none").get("m")) == (1, None)
    assert ("n" in config, "none" in config, config.architecture) == (True, False, "")
    assert config.without("n", "x", "yes", "ids", "big") == {"part": {"m": 1}}
    with pytest.raises(ModelError, match=r"draft d: config.json: yes is True, not a positive number"):
        config.count("yes")


def test_a_folder_without_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        read_config(tmp_path / "nowhere")
    for text, said in (("{", "is not JSON"), ("[]", "must hold an object"), ("[" * 100_000, "is not JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=said):
            read_config(tmp_path)
