"""Tensors of a checkpoint folder, without the model they belong to."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from driftwatch.errors import ModelError
from driftwatch.shadow.device import explain

VOCABULARY_MAPS = ("d2t", "t2d")
"""Tensors of whole numbers."""


def tensor_names(folder: Path, what: str) -> set[str]:
    """Names of the tensors a folder stores. Raises ModelError if a file cannot be read."""
    names: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                names |= set(file.keys())
        except (SafetensorError, OSError) as error:
            raise _unreadable(error, path, what) from None
    return names or set(_read_bin(folder, what))


def read_tensors(folder: Path, what: str) -> dict[str, torch.Tensor]:
    """All tensors by name, on the CPU as stored; safetensors where there are any, else ``.bin`` read without running
    code. Raises ModelError if there are none, a file cannot be read, or a weight is quantised or no number."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        except (SafetensorError, OSError) as error:
            raise _unreadable(error, path, what) from None
    tensors = tensors or _read_bin(folder, what)
    for name, tensor in tensors.items():
        if name not in VOCABULARY_MAPS and is_quantised(tensor):
            raise ModelError(f"{what}: {name} is quantised ({tensor.dtype}); export the draft as bf16, fp16 or fp32")
    check_finite(tensors, what)
    return tensors


def is_quantised(tensor: torch.Tensor) -> bool:
    """Whether a stored weight is in a type that says nothing without its scales."""
    return tensor.dtype.itemsize < 2 or not tensor.is_floating_point()


def check_finite(tensors: Mapping[str, torch.Tensor], what: str) -> None:
    """Raises ModelError naming the first floating-point tensor that holds NaN or infinity: such weights raise no error
    anywhere, their draft is just never accepted."""
    for name, tensor in tensors.items():
        wide = tensor.is_floating_point() and tensor.dtype.itemsize >= 2
        if wide and not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{what}: tensor {name} holds NaN or infinity; was its training or its export cut off?")


def read_tensor(folder: Path, endings: tuple[str, ...], what: str) -> torch.Tensor:
    """The one tensor of a folder's safetensors whose name ends so, on the CPU as stored; nothing else is read.

    Raises ModelError if there is none, or more than one, or if it is quantised.
    """
    places: list[tuple[str, Path]] = []
    path = folder
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                places += [(name, path) for name in file.keys() if name.endswith(endings)]  # noqa: SIM118  (not a dict)
        if len(places) != 1:
            found = ", ".join(name for name, _ in places) or "no tensor of this name in any .safetensors"
            raise ModelError(f"{what}: one {endings[0]} is needed, found: {found}")
        (name, path) = places[0]
        with safe_open(path, "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise _unreadable(error, path, what) from None
    if is_quantised(tensor):
        raise ModelError(f"{what}: {name} is quantised ({tensor.dtype}); a head with a table of its own is needed")
    return tensor


def _unreadable(error: Exception, path: Path, what: str) -> ModelError:
    return ModelError(f"{explain(error, f'{what}: {path.name} cannot be read')}; is the file whole?")


def _read_bin(folder: Path, what: str) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.bin")):
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, struct.error) as error:
            raise _unreadable(error, path, what) from None
        if not isinstance(loaded, dict):
            raise ModelError(f"{what}: {path.name} holds no tensors by name")
        tensors |= {str(name): value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise ModelError(f"{what}: no .safetensors or .bin weights in it")
    return tensors
