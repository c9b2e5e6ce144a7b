"""The doctor on DFlash, P-EAGLE and MTP drafts: what they are, whether they work, and wrong readings by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from driftwatch.settings import Shadow
from driftwatch.shadow.block.readings import other_readings
from driftwatch.shadow.block.replay import BlockDraft
from driftwatch.shadow.checkup import checkup
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.selftest import self_test
from driftwatch.shadow.target import Target

from . import heads
from .conftest import DATA, tokens_of, trace

MODELS = DATA / "models"


@pytest.fixture(scope="module")
def served() -> list[Tokens]:
    return [tokens_of(record) for record in trace("eagle3.T0.8")[:16]]


def copy(path: Path, **changes: Any) -> Path:
    shutil.copytree(MODELS / "dflash", path)
    config = json.loads((path / "config.json").read_text())
    config |= changes
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_good_draft_fits_as_it_is_loaded(target: Target, served: list[Tokens]) -> None:
    fit = self_test(BlockDraft.load("dflash", MODELS / "dflash", target, depths=4), target, served, batch_tokens=16_384)
    print(f"{fit.tokens} tokens, {fit.hits:.3f} accepted, chance {fit.chance:.3f}")
    assert fit.works
    assert fit.tokens == 16 * 63
    assert fit.better is None


WRONG = {
    "one too high": ({"dflash_config": {"mask_token_id": 2047, "target_layer_ids": [2, 4, 6]}}, "one too high"),
    "one too low": ({"dflash_config": {"mask_token_id": 2047, "target_layer_ids": [0, 2, 4]}}, "one too low"),
    "rope": ({"rope_parameters": {"rope_theta": 3.0, "rope_type": "default"}}, "rope_theta is missing or wrong"),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_loading_is_named(how: str, target: Target, served: list[Tokens], tmp_path: Path) -> None:
    changes, cause = WRONG[how]
    draft = BlockDraft.load("dflash", copy(tmp_path / "draft", **changes), target, depths=4)
    fit = self_test(draft, target, served, batch_tokens=16_384)
    assert fit.better is not None
    reading, score, loaded, errors = fit.better
    print(f"{how}: {reading.name}, {score:.3f} against {loaded:.3f}, {errors:.1f} standard errors")
    assert cause in reading.cause
    if "one too" in how:
        assert "hidden_states [2, 4, 6]" in reading.cause


def test_a_random_draft_is_no_better_than_chance(target: Target, served: list[Tokens], tmp_path: Path) -> None:
    folder = heads.written(tmp_path, *heads.mtp(1))
    draft = BlockDraft.load("mtp", folder, target, depths=2)
    assert not self_test(draft, target, served[:4], batch_tokens=16_384).works


def test_the_other_readings_of_a_parallel_head(target: Target, tmp_path: Path) -> None:
    draft = BlockDraft.load("peagle", heads.written(tmp_path, *heads.peagle(2, rope_theta=7.0)), target, depths=2)
    found = {reading.name: reading for reading in other_readings(draft, target.model())}
    assert set(found) == {
        "target layers one lower",
        "target layers one higher",
        "norm_before_residual turned",
        "the target's rope_theta",
    }
    assert found["target layers one higher"].spec.reads.layers == (3, 5, 8)
    for reading in found.values():  # each computes something else
        other = BlockDraft(reading.spec, draft.checkpoint, target, depths=2, agreement=True)
        loaded = BlockDraft(draft.spec, draft.checkpoint, target, depths=2, agreement=True)
        sample = [Tokens([5, 6, 7], [8, 9, 10, 11, 12, 13])]
        mine, theirs = (one.measure(sample)[0][1] for one in (loaded, other))
        assert mine is not None
        assert theirs is not None
        assert (mine.overlap != theirs.overlap).any()


def said(draft: Path) -> str:
    shadow = Shadow(device="cpu", dtype="float32")
    target = MODELS / "target"
    return "\n".join(f"{level} {text}" for level, text in checkup(shadow, str(draft), target, target, None))


def test_doctor_says_what_a_draft_is(tmp_path: Path) -> None:
    dflash = said(MODELS / "dflash")
    assert "ok dflash draft, 344,960 parameters, 2,048 token ids" in dflash
    assert (
        "reads hidden_states [2, 4, 6] of 8 layers; 7 proposals a window, replayed at every start; mask token 2047"
        in dflash
    )
    assert "embedding: target, head: target" in dflash
    assert "inferred: layer ids [1, 3, 5] are layer outputs" in dflash
    assert "of its first proposals accepted on 564 tokens of text that the target wrote" in dflash
    assert "problem" not in dflash
    config, tensors = heads.mtp(3)
    mtp = said(heads.written(tmp_path, config, tensors | {"rotary_emb.inv_freq": torch.zeros(4)}))
    assert "reads the last hidden states of 8 layers; as many proposals as asked for" in mtp
    assert "ok ignored: rotary_emb.inv_freq" in mtp
    assert "problem no better than chance" in mtp
