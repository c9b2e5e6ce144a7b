"""What a profile is bound to, known without loading anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from driftwatch.economics.profile import Bound, CostProfile
from driftwatch.economics.shape import Shape
from driftwatch.economics.step import StepTime
from driftwatch.errors import ModelError
from driftwatch.shadow.open import Opening, open_draft
from driftwatch.shadow.profile.bound import draft_hash, misfits, shape_of, target_hash
from driftwatch.shadow.target import Target
from tests.unit.shadow.conftest import CPU, DATA

MODELS = DATA / "models"
TREE = f"{MODELS / 'eagle3'}:steps=5,topk=4,tokens=8"


@pytest.mark.parametrize("spec", [str(MODELS / "chain"), str(MODELS / "eagle3"), TREE, str(MODELS / "dflash")])
def test_the_fingerprint_is_that_of_the_loaded_draft(spec: str, target: Target) -> None:
    assert draft_hash(spec) == open_draft(spec, Opening(CPU, torch.float32), target).fingerprint.sha256
    assert (
        draft_hash("ngram:min=1,max=3")
        == open_draft("ngram:min=1,max=3", Opening(CPU, torch.float32)).fingerprint.sha256
    )


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (MODELS / "chain", "chain"),
        (MODELS / "eagle3", "chain"),
        (MODELS / "dflash", "block"),
        (MODELS / "domino", "block"),
        (MODELS / "peagle", "block"),
        (TREE, "steps=5,topk=4,tokens=8"),
        ("ngram:min=1,max=3", "chain"),
    ],
)
def test_how_a_draft_proposes_is_seen_in_its_checkpoint_and_name(spec: str | Path, shape: str) -> None:
    assert str(shape_of(str(spec))) == shape


def test_what_a_profile_is_not_of(tmp_path: Path) -> None:
    chain, target = MODELS / "chain", MODELS / "target"
    bound = Bound("CPU", "float32", target_hash(target), draft_hash(str(chain)))
    profile = CostProfile(bound, "measured", StepTime(0.02), StepTime(0.002), "measured", shape=Shape())
    assert misfits(profile, str(chain), target) == []
    assert misfits(profile, None, None) == []
    assert misfits(profile, "ngram:min=1,max=3", target) == [], "prompt lookup has costs of its own: none"
    assert misfits(profile, str(MODELS / "eagle3"), chain) == [f"target {chain}", f"draft {MODELS / 'eagle3'}"]
    assert misfits(CostProfile.entered(Bound("", "", ""), StepTime(0.02)), str(chain), target) == []
    with pytest.raises(ModelError, match="no .safetensors"):
        misfits(profile, str(tmp_path), None)
