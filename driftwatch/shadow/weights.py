"""Tensors of a checkpoint folder, without the model they belong to."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from driftwatch.errors import ModelError
from driftwatch.shadow.device import explain


def tensor_names(folder: Path, what: str) -> set[str]:
    """Names of the tensors a folder stores. Raises ModelError if a file cannot be read."""
    names: set[str] = set()
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                names |= set(file.keys())
    except (SafetensorError, OSError) as error:
        raise explain(error, what) from None
    return names or set(_read_bin(folder, what))


def read_tensors(folder: Path, what: str) -> dict[str, torch.Tensor]:
    """All tensors by name, on the CPU as stored; safetensors where there are any, else ``.bin`` read without running
    code. Raises ModelError if there are none, or a file cannot be read."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except (SafetensorError, OSError) as error:
        raise explain(error, what) from None
    return tensors or _read_bin(folder, what)


def _read_bin(folder: Path, what: str) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.bin")):
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, OSError, EOFError) as error:
            raise explain(error, f"{what}: {path.name}") from None
        if not isinstance(loaded, dict):
            raise ModelError(f"{what}: {path.name} holds no tensors by name")
        tensors |= {str(name): value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise ModelError(f"{what}: no .safetensors or .bin weights in it")
    return tensors
