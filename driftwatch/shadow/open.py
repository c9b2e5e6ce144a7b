"""Opening a draft: from a folder whose kind is detected, or from a name with parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from driftwatch.acceptance import DEFAULT_GAMMA, Rule
from driftwatch.errors import ModelError
from driftwatch.settings import Shadow
from driftwatch.shadow import ngram
from driftwatch.shadow.block.replay import ARCHITECTURES, BlockDraft
from driftwatch.shadow.causal import PREFILL_TOKENS
from driftwatch.shadow.chain import ChainDraft
from driftwatch.shadow.config import read_config
from driftwatch.shadow.device import pick_device, pick_dtype
from driftwatch.shadow.draft import Draft
from driftwatch.shadow.eagle3.checkpoint import is_eagle3, read_checkpoint
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.eagle3.rollout import Eagle3TreeDraft
from driftwatch.shadow.eagle3.tree import split_spec
from driftwatch.shadow.lookahead.method import KIND as LOOKAHEAD
from driftwatch.shadow.target import NoTargetError, Target
from driftwatch.shadow.weights import tensor_names

Kind = Literal["chain", "eagle3", "ngram", "dflash", "domino", "peagle", "mtp"]

NAMED = (ngram.KIND, LOOKAHEAD)

OTHER_ARCHITECTURES = {
    "Eagle3DeepseekV2ForCausalLM": "an EAGLE-3 head with latent attention (MLA)",
    "DFlash2DraftModel": "a DFlash 2 draft",
    "DSparkDraftModel": "a DSpark draft",
    "EagleModel": "an EAGLE-1 or EAGLE-2 head",
}

REPLAYED = "what is replayed are chain, EAGLE-3, DFlash, Domino, P-EAGLE and MTP drafts, and n-grams"


@dataclass(frozen=True)
class Opening:
    """How drafts are to be replayed. ``agreement``: give the agreement figures too, where the draft can."""

    device: torch.device
    dtype: torch.dtype
    rule: Rule = "argmax"
    depths: int = DEFAULT_GAMMA
    agreement: bool = False
    prefill_tokens: int = PREFILL_TOKENS

    @classmethod
    def configured(
        cls, shadow: Shadow, rule: Rule = "argmax", *, depths: int = DEFAULT_GAMMA, agreement: bool = False
    ) -> Opening:
        """As the settings have drafts run. Raises SettingsError for a device that is not there."""
        device = pick_device(shadow.device)
        return cls(device, pick_dtype(shadow.dtype, device), rule, depths, agreement, shadow.batch_tokens)


def is_named(spec: str | Path) -> bool:
    """Whether a draft is given by name, ``ngram:min=1,max=3``, and not as a path."""
    return str(spec).partition(":")[0] in NAMED and not Path(spec).exists()


def folder_of(spec: str | Path) -> Path:
    """The checkpoint folder: the path itself, less a tree that is asked for, or the folder of the weights file that is
    named. Raises ModelError for what is no tree."""
    path = Path(split_spec(spec)[0])
    return path.parent if path.is_file() else path


def kind_of(spec: str | Path) -> Kind:
    """What kind of draft this is. Raises ModelError for one that cannot be replayed, saying what it is."""
    if is_named(spec):
        if str(spec).startswith(LOOKAHEAD):
            raise ModelError(f"draft {spec}: lookahead decoding is run with the target: `driftwatch replay` does that")
        return "ngram"
    if Path(spec).suffix == ".gguf":
        raise ModelError(f"draft {spec}: a draft is not read from GGUF; give a folder with config.json and safetensors")
    folder = folder_of(spec)
    what = f"draft {folder}"
    if (folder / "training_state.pt").exists():
        raise ModelError(f"{what}: a SpecForge training checkpoint; export it first (specforge export --to sglang)")
    config = read_config(folder)
    architecture = config.architecture
    if architecture in OTHER_ARCHITECTURES:
        raise ModelError(f"{what}: {OTHER_ARCHITECTURES[architecture]}; {REPLAYED}")
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    names = tensor_names(folder, what)
    if is_eagle3(config, names):
        return "eagle3"
    if trained := config.get("speculators_model_type"):
        raise ModelError(f"{what}: a speculators draft of type {trained!r}; {REPLAYED}")
    if "fc.weight" in names:
        raise ModelError(f"{what}: an EAGLE-1 or EAGLE-2 head (fc.weight, no midlayer); {REPLAYED}")
    return "chain"


def open_draft(spec: str | Path, opening: Opening, target: Target | None = None) -> Draft:
    """Load a draft. Raises ModelError with one line if it cannot be used, or needs a target and there is none."""
    kind = kind_of(spec)
    if kind == "ngram":
        return ngram.parse(str(spec), opening.depths, opening.rule)
    folder, (_, tree) = folder_of(spec), split_spec(spec)
    if tree is not None and kind != "eagle3":
        raise ModelError(f"draft {spec}: EAGLE-3 heads alone draft trees, this is a {kind} draft; leave out its tree")
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
        what = "an EAGLE-3 head" if kind == "eagle3" else f"a draft of kind {kind}"
        raise NoTargetError(
            f"draft {folder}: {what} reads its target's hidden states; give the target's folder too, or an engine that "
            "runs it (hidden_states)"
        )
    if kind != "eagle3":
        return BlockDraft.load(kind, folder, target, depths=opening.depths, **shared)
    if tree is not None:
        return Eagle3TreeDraft(read_checkpoint(folder), target, tree, **shared)
    return Eagle3Draft(read_checkpoint(folder), target, depths=opening.depths, **shared)
