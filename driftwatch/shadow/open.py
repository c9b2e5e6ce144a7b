"""Opening a draft: from a folder whose kind is detected, or from a name with parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from driftwatch.acceptance import DEFAULT_GAMMA, Rule
from driftwatch.errors import ModelError
from driftwatch.shadow import lookahead, ngram
from driftwatch.shadow.causal import PREFILL_TOKENS
from driftwatch.shadow.chain import ChainDraft
from driftwatch.shadow.draft import Draft, read_config
from driftwatch.shadow.eagle3.checkpoint import is_eagle3, read_checkpoint
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.target import Target
from driftwatch.shadow.weights import tensor_names

Kind = Literal["chain", "eagle3", "ngram"]

NAMED = (ngram.KIND, lookahead.KIND)

OTHER_ARCHITECTURES = {
    "Eagle3DeepseekV2ForCausalLM": "an EAGLE-3 head with latent attention (MLA)",
    "PEagleDraftModel": "a P-EAGLE draft",
    "DFlashDraftModel": "a DFlash draft",
    "DFlash2DraftModel": "a DFlash draft",
    "DominoDraftModel": "a Domino draft",
    "DSparkDraftModel": "a DSpark draft",
    "Qwen3_5MTPDraftModel": "an MTP draft",
    "EagleModel": "an EAGLE-1 or EAGLE-2 head",
}


@dataclass(frozen=True)
class Opening:
    """How drafts are to be replayed. ``agreement``: give the agreement figures too, where the draft can."""

    device: torch.device
    dtype: torch.dtype
    rule: Rule = "argmax"
    depths: int = DEFAULT_GAMMA
    agreement: bool = False
    prefill_tokens: int = PREFILL_TOKENS


def is_named(spec: str | Path) -> bool:
    """Whether a draft is given by name, ``ngram:min=1,max=3``, and not as a path."""
    return str(spec).partition(":")[0] in NAMED and not Path(spec).exists()


def folder_of(spec: str | Path) -> Path:
    """The checkpoint folder: the path itself, or the folder of the weights file that is named."""
    path = Path(spec)
    return path.parent if path.is_file() else path


def kind_of(spec: str | Path) -> Kind:
    """What kind of draft this is. Raises ModelError for one that cannot be replayed, saying what it is."""
    if is_named(spec):
        if str(spec).startswith(lookahead.KIND):
            raise ModelError(f"draft {spec}: lookahead decoding is run with the target, it cannot be replayed")
        return "ngram"
    folder = folder_of(spec)
    what = f"draft {folder}"
    if (folder / "training_state.pt").exists():
        raise ModelError(f"{what}: a SpecForge training checkpoint; export it first (specforge export --to sglang)")
    config = read_config(folder)
    architecture = str((config.get("architectures") or [""])[0])
    if architecture in OTHER_ARCHITECTURES:
        raise ModelError(f"{what}: {OTHER_ARCHITECTURES[architecture]}; chain, EAGLE-3 and n-gram drafts are replayed")
    names = tensor_names(folder, what)
    if is_eagle3(config, names):
        return "eagle3"
    if trained := config.get("speculators_model_type"):
        raise ModelError(f"{what}: a speculators draft of type {trained!r}; chain, EAGLE-3 and n-gram are replayed")
    if "fc.weight" in names:
        raise ModelError(f"{what}: an EAGLE-1 or EAGLE-2 head (fc.weight, no midlayer); chain, EAGLE-3 and n-gram are")
    return "chain"


def open_draft(spec: str | Path, opening: Opening, target: Target | None = None) -> Draft:
    """Load a draft. Raises ModelError with one line if it cannot be used, or needs a target and there is none."""
    kind = kind_of(spec)
    if kind == "ngram":
        return ngram.parse(str(spec), opening.depths)
    folder = folder_of(spec)
    shared: dict[str, Any] = {"rule": opening.rule, "agreement": opening.agreement}
    if kind == "chain":
        return ChainDraft.load(
            folder,
            device=opening.device,
            dtype=opening.dtype,
            target=target,
            prefill_tokens=opening.prefill_tokens,
            **shared,
        )
    if target is None:
        raise ModelError(
            f"draft {folder}: an EAGLE-3 head reads its target's hidden states; give the target's folder too"
        )
    return Eagle3Draft(read_checkpoint(folder), target, depths=opening.depths, **shared)
