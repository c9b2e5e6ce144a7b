"""What a cost profile is made for: the device, the weights of target and draft, and how that draft proposes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from driftwatch.economics.profile import CostProfile
from driftwatch.economics.shape import CHAIN, Shape
from driftwatch.shadow.draft import hash_weights
from driftwatch.shadow.eagle3.tree import split_spec, tree_sha256
from driftwatch.shadow.ngram import parse as parse_ngram
from driftwatch.shadow.open import folder_of, is_named, kind_of

BLOCKS = ("dflash", "domino", "peagle")
"""Kinds whose proposals all come out of one pass."""


def shape_of(spec: str) -> Shape:
    """How a draft makes the proposals of a window. Raises ModelError for what is no draft."""
    if is_named(spec):
        return CHAIN
    if (tree := split_spec(spec)[1]) is not None:
        return Shape("tree", tree.steps, tree.topk, tree.tokens)
    return Shape("block") if kind_of(spec) in BLOCKS else CHAIN


def draft_hash(spec: str) -> str:
    """The fingerprint of a draft without loading it; a tree's is another than its head's."""
    if is_named(spec):
        return parse_ngram(spec).fingerprint.sha256
    weights, tree = hash_weights(folder_of(spec)), split_spec(spec)[1]
    return weights if tree is None else tree_sha256(weights, tree)


def target_hash(path: Path) -> str:
    """SHA-256 of a target's weights: of its folder, or of its one GGUF file."""
    if not path.is_file():
        return hash_weights(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def misfits(profile: CostProfile, draft: str | None, target: Path | None) -> list[str]:
    """In what a profile is of others than these, a name each; what it does not say, or is not given, is no misfit.

    Raises ModelError if weights cannot be read.
    """
    bound, found = profile.bound, []
    if target is not None and bound.target and bound.target != target_hash(target):
        found.append(f"target {target}")
    if draft is not None and not is_named(draft) and bound.draft and bound.draft != draft_hash(draft):
        found.append(f"draft {draft}")
    return found


def device_name(device: torch.device) -> str:
    """What times depend on: the GPU's name, or the processor's with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
