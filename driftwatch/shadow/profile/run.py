"""From folders to a cost profile: which loop decodes, what it is bound to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from driftwatch.economics.profile import Bound, CostProfile
from driftwatch.errors import ProfileError
from driftwatch.shadow.causal import Causal, load_model
from driftwatch.shadow.draft import hash_weights
from driftwatch.shadow.eagle3.checkpoint import read_checkpoint
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.eagle3.tree import split_spec
from driftwatch.shadow.ngram import parse as parse_ngram
from driftwatch.shadow.open import folder_of, kind_of
from driftwatch.shadow.profile.assisted import Assisted
from driftwatch.shadow.profile.loop import Loop
from driftwatch.shadow.profile.measure import BUDGET_S, Grid, measure
from driftwatch.shadow.profile.passes import Cached, Eagle3Passes, Passes, Proposer
from driftwatch.shadow.target import Target

LoopName = Literal["passes", "transformers"]


@dataclass(frozen=True)
class Shapes:
    """What to measure, as asked for; empty is the device's usual choice."""

    batches: Sequence[int] = ()
    contexts: Sequence[int] = ()
    gammas: Sequence[int] = ()


def profile(
    target_path: Path,
    draft: str | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    shapes: Shapes | None = None,
    loop: LoopName = "passes",
    threads: int | None = None,
    budget_s: float = BUDGET_S,
) -> CostProfile:
    """Measure a target and, where one is given, a chain or EAGLE-3 draft; an n-gram draft is taken to cost nothing.

    Raises ModelError if a model cannot be used, ProfileError if its kind of draft cannot be measured.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    kind = None if draft is None else kind_of(draft)
    if kind not in (None, "chain", "eagle3", "ngram"):
        raise ProfileError(f"draft {draft}: passes of a {kind} draft are not measured here; enter its costs in a file")
    if kind == "eagle3" and split_spec(str(draft))[1] is not None:
        raise ProfileError(f"draft {draft}: costs are measured of chains of proposals; leave out the tree")
    if loop == "transformers" and kind == "eagle3":
        raise ProfileError(f"draft {draft}: transformers assists with chain drafts only; leave out --loop transformers")
    target = Target(target_path, device=device, dtype=dtype)
    causal = target.model()
    chain, proposer, fingerprint = None, None, None
    if draft is not None and kind == "ngram":
        fingerprint = parse_ngram(draft).fingerprint.sha256
    elif draft is not None:
        folder = folder_of(draft)
        fingerprint = hash_weights(folder)
        if kind == "chain":
            chain = load_model("draft", folder, device=device, dtype=dtype, ignored={"d2t"})
        else:
            proposer = Eagle3Passes(Eagle3Draft(read_checkpoint(folder), target, depths=1))
    bound = Bound(device_name(device), str(dtype).removeprefix("torch."), target_hash(target_path), fingerprint)
    decoding = _loop(loop, causal, chain, proposer)
    asked = shapes or Shapes()
    grid = Grid.of(
        device,
        batches=asked.batches,
        contexts=asked.contexts,
        gammas=asked.gammas,
        most_sequences=decoding.most_sequences,
    )
    drafted = kind in ("chain", "eagle3")
    found = CostProfile.fitted(bound, measure(decoding, grid, drafted=drafted, budget_s=budget_s))
    return found.with_draft(0.0) if kind == "ngram" else found


def _loop(name: LoopName, target: Causal, chain: object | None, proposer: Proposer | None) -> Loop:
    if name == "passes":
        return Passes(target, Cached(Causal(chain)) if chain is not None else proposer)
    if chain is None:
        raise ProfileError("--loop transformers verifies what an assistant proposes: give a chain draft with --draft")
    return Assisted(target.model, chain)


def target_hash(path: Path) -> str:
    """SHA-256 of a target's weights: of its folder, or of its one GGUF file."""
    if not path.is_file():
        return hash_weights(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
