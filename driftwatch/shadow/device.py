"""Where and in which type the shadow computes."""

from __future__ import annotations

import torch

from driftwatch.errors import ModelError, SettingsError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def pick_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one, else the CPU. Raises SettingsError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(f"`shadow.device`: {name!r} cannot be used: {reason}; write auto, cpu or cuda:N") from None
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on a GPU, as engines serve, and float32 on a CPU, where bfloat16 is slow or emulated."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[name]


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU as its driver counts it, all processes on it included; None on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def cap_memory(device: torch.device, share: float) -> None:
    """Let this process take no more than a share of a GPU's memory; beyond it, it runs out. No-op on a CPU."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, device)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Both allocators: CUDA's has a class of its own, the CPU's only a message."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def explain(error: Exception, what: str) -> ModelError:
    """A load error as one line: the first of its own, and the next where that only introduces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return ModelError(f"{what}: {' '.join(lines[:2]) if lines[0].endswith(':') else lines[0]}")
