"""Checkpoints of DFlash, Domino, P-EAGLE and MTP drafts: every tensor accounted for, what is wrong said in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from driftwatch.errors import ModelError
from driftwatch.shadow.block import dflash, mtp, peagle
from driftwatch.shadow.block.head import Kind
from driftwatch.shadow.block.replay import READERS, BlockDraft
from driftwatch.shadow.open import Opening, kind_of, open_draft
from driftwatch.shadow.target import Target

from . import heads
from .conftest import CPU
from .heads import Config, Tensors

MAKE: dict[Kind, Callable[..., tuple[Config, Tensors]]] = {
    "dflash": heads.dflash,
    "domino": heads.domino,
    "peagle": heads.peagle,
    "mtp": heads.mtp,
}
OPENING = Opening(CPU, torch.float32, depths=4)


@pytest.mark.parametrize("kind", list(MAKE))
def test_a_folder_is_opened_as_what_it_is(kind: Kind, target: Target, tmp_path: Path) -> None:
    folder = heads.written(tmp_path, *MAKE[kind]())
    assert kind_of(folder) == kind
    draft = open_draft(folder, OPENING, target)
    assert isinstance(draft, BlockDraft)
    assert draft.fingerprint.kind == kind
    assert draft.mapped == (kind == "peagle")
    with pytest.raises(ModelError, match=f"a draft of kind {kind} reads its target's hidden states"):
        open_draft(folder, OPENING)


@pytest.mark.parametrize("kind", list(MAKE))
def test_every_tensor_is_needed_and_none_is_left(kind: Kind, tmp_path: Path) -> None:
    config, tensors = MAKE[kind]()
    optional = {"t2d"}
    for name in tensors:
        left = {key: value for key, value in tensors.items() if key != name}
        folder = heads.written(tmp_path / name, config, left)
        if name in optional:
            READERS[kind](folder)
            continue
        with pytest.raises(ModelError, match=f"tensor {name} is missing|no d2t says which") as caught:
            READERS[kind](folder)
        assert "\n" not in str(caught.value)
    more = tensors | {"layers.9.self_attn.q_proj.weight": torch.zeros(2, 2)}
    with pytest.raises(ModelError, match="1 tensors belong to no part of it, the first is layers.9"):
        READERS[kind](heads.written(tmp_path / "more", config, more))
    tables = tensors | {"rotary_emb.inv_freq": torch.zeros(8)}
    _, checkpoint = READERS[kind](heads.written(tmp_path / "tables", config, tables))
    assert checkpoint.ignored == ("rotary_emb.inv_freq",)


def test_early_domino_checkpoints_named_their_correction_otherwise(target: Target, tmp_path: Path) -> None:
    config, tensors = heads.domino()
    early = {
        f"logit_head.{name}" if name.startswith(("prefix_gru", "embed_proj")) else name: value
        for name, value in tensors.items()
    }
    drafts = [
        BlockDraft.load("domino", heads.written(tmp_path / name, config, stored), target, depths=3)
        for name, stored in (("early", early), ("late", tensors))
    ]
    assert set(drafts[0].checkpoint.tensors) == set(drafts[1].checkpoint.tensors)


def test_layer_ids_are_outputs(tmp_path: Path) -> None:
    spec, checkpoint = dflash.read(heads.written(tmp_path / "a", *heads.dflash()))
    assert spec.reads.layers == (1, 5, 7)
    assert "layer ids [0, 4, 6] are layer outputs: hidden_states [1, 5, 7]" in checkpoint.inferred
    head, checkpoint = peagle.read(heads.written(tmp_path / "b", *heads.peagle()))
    assert head.reads.layers == (2, 4, 7)
    config, tensors = heads.peagle()
    del config["eagle_config"]
    head, checkpoint = peagle.read(heads.written(tmp_path / "c", config, tensors))
    assert head.reads.layers == ()
    assert any("the default layers" in note for note in checkpoint.inferred)


@pytest.mark.parametrize(
    ("target_layers", "layers", "ids"),
    [(36, 5, [1, 9, 17, 25, 33]), (32, 1, [16]), (28, 4, [1, 9, 17, 25]), (8, 2, [1, 5])],
)
def test_the_default_layers_of_dflash(target_layers: int, layers: int, ids: list[int]) -> None:
    """SpecForge's build_target_layer_ids, the first as its Qwen3-8B configuration has them."""
    assert list(dflash.default_layer_ids(target_layers, layers)) == ids


def test_the_default_layers_of_a_target(target: Target, tmp_path: Path) -> None:
    config, tensors = heads.peagle()
    del config["eagle_config"]
    draft = BlockDraft.load("peagle", heads.written(tmp_path, config, tensors), target, depths=4)
    assert draft.layers == (2, 4, 5)


def test_own_copies_of_the_targets_tensors_are_used(target: Target, tmp_path: Path) -> None:
    config, tensors = heads.mtp()
    model = target.model()
    copies = {"embed_tokens.weight": model.embedding.clone(), "mtp.lm_head.weight": 2 * model.head_weight}
    _, checkpoint = mtp.read(heads.written(tmp_path / "own", config, tensors | copies))
    assert "lm_head.weight" in checkpoint.tensors
    assert checkpoint.inferred == ("its norms scale by 1 + weight, as Qwen3.5's do",)
    own = BlockDraft.load("mtp", tmp_path / "own", target, depths=3)
    shared = BlockDraft.load("mtp", heads.written(tmp_path / "shared", config, tensors), target, depths=3)
    torch.testing.assert_close(own._head_weight, 2 * shared._head_weight)


def changed(**values: Any) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        config.update(values)

    return change


def without(key: str) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        config.pop(key)

    return change


def offsets_lost(config: Config, tensors: Tensors) -> None:
    tensors["d2t"].zero_()
    tensors["t2d"].fill_(True)


WRONG: list[tuple[Kind, Callable[[Config, Tensors], None], str]] = [
    ("dflash", changed(block_size=1), "block_size is 1, which leaves nothing to propose"),
    ("dflash", without("block_size"), "block_size is None, not a positive number"),
    ("dflash", changed(dflash_config={"target_layer_ids": [0, 4, 6]}), "names no dflash_config.mask_token_id"),
    (
        "dflash",
        changed(dflash_config={"mask_token_id": 1, "target_layer_ids": [-1, 2, 3]}),
        "target_layer_ids is \\[-1, 2, 3\\], not a list of numbers",
    ),
    (
        "dflash",
        changed(dflash_config={"mask_token_id": 1, "target_layer_ids": [0, 4]}),
        r"fc.weight has shape \[128, 384",
    ),
    ("dflash", changed(dflash_config={"projector_type": "domino"}), "projector_type is 'domino', not dflash"),
    ("dflash", changed(layer_types=["full_attention"]), "do not name 2 full or sliding layers"),
    ("dflash", changed(layer_types=["sliding_attention"] * 2), "sliding_window is None, not a positive number"),
    ("dflash", changed(quantization_config={}), "it is quantised"),
    ("dflash", changed(num_key_value_heads=3), "4 attention heads do not share 3 kv heads"),
    ("domino", changed(dflash_config={"mask_token_id": 1, "target_layer_ids": [0, 4, 6]}), "emb_dim is None"),
    ("peagle", without("pard_token"), "names no mask token; write the one it was trained with as pard_token"),
    ("peagle", changed(pard_token=2048), "names mask token 2048 of 2048"),
    ("peagle", offsets_lost, "its vocabulary map was never loaded"),
    ("peagle", changed(target_hidden_size=64), "fc.weight has shape"),
    ("mtp", changed(attn_output_gate=False), "q_proj.weight has shape"),
    ("mtp", changed(num_hidden_layers=2), "MTP heads of one layer are supported"),
]


@pytest.mark.parametrize(("kind", "corrupt", "message"), WRONG)
def test_what_is_wrong_is_one_line(
    kind: Kind, corrupt: Callable[[Config, Tensors], None], message: str, tmp_path: Path
) -> None:
    config, tensors = MAKE[kind]()
    corrupt(config, tensors)
    with pytest.raises(ModelError, match=message) as caught:
        READERS[kind](heads.written(tmp_path, config, tensors))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 4, 8]}}, r"reads hidden_states \[1, 5, 9\]"),
        ({"dflash_config": {"mask_token_id": 2048, "target_layer_ids": [0, 4, 6]}}, "mask token 2048 is none of"),
    ],
)
def test_what_does_not_fit_the_target(changes: Any, message: str, target: Target, tmp_path: Path) -> None:
    folder = heads.written(tmp_path, *heads.dflash(**changes))
    with pytest.raises(ModelError, match=message):
        BlockDraft.load("dflash", folder, target, depths=4)


def test_widths_and_vocabularies_must_fit(target: Target, tmp_path: Path) -> None:
    narrow = heads.written(tmp_path / "narrow", *heads.peagle(target_hidden_size=64))
    with pytest.raises(ModelError, match="reads hidden states 64 wide, the target's are 128"):
        BlockDraft.load("peagle", narrow, target, depths=4)
    config, tensors = heads.mtp(vocab_size=4096)
    tensors["mtp.lm_head.weight"] = torch.zeros(4096, heads.HIDDEN)
    large = heads.written(tmp_path / "large", config, tensors)
    with pytest.raises(ModelError, match="proposes token ids up to 4095, the target has 2048"):
        BlockDraft.load("mtp", large, target, depths=4)
