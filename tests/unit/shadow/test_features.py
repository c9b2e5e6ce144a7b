"""Offline features: what lies in the files is what the target computes, and SpecForge's own code takes it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import namedtuple
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from driftwatch.errors import ModelError, RecordError
from driftwatch.shadow.features import Reading, write
from driftwatch.shadow.open import Opening, open_draft
from driftwatch.shadow.target import Target

from .conftest import CPU, DATA, trace

MODELS = DATA / "models"
ROWS = [
    {
        "input_ids": [*(one.prompt_token_ids or []), *(one.output_token_ids or [])],
        "loss_mask": [0] * len(one.prompt_token_ids or []) + [1] * len(one.output_token_ids or []),
    }
    for one in trace("eagle3.T0")[:5]
]


def specforge(module: str) -> ModuleType:
    reason = f"{module} of SpecForge 0.2.0 cannot be imported: not checked (pip install --no-deps specforge)"
    found: ModuleType = pytest.importorskip(module, reason=reason, exc_type=ImportError)
    return found


def rows(folder: Path, *more: dict[str, Any]) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (*ROWS, *more)))
    return path


def reading(name: str, target: Target) -> Reading:
    return Reading.of(open_draft(MODELS / name, Opening(CPU, torch.float32), target), target)


@pytest.fixture(scope="module")
def hidden() -> list[Any]:
    """Of each row, all hidden states and logits by transformers alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    with torch.no_grad():
        return [model(torch.tensor([row["input_ids"]]), output_hidden_states=True) for row in ROWS]


def test_specforge_reads_what_an_eagle3_head_is_trained_on(target: Target, tmp_path: Path, hidden: list[Any]) -> None:
    told = write(rows(tmp_path), tmp_path / "features", reading("eagle3", target), max_length=4096)
    reader = specforge("specforge.algorithms.eagle3.data")
    refs = reader.build_offline_reader(str(tmp_path / "features"), run_id="r", ttt_length=7, max_len=4096).read()
    stored = specforge("specforge.runtime.data_plane.feature_store")
    assert len(refs) == len(ROWS) == told["rows"]
    assert told["tokens"] == sum(len(row["input_ids"]) for row in ROWS)
    assert (
        told["layers"]
        == json.loads((MODELS / "eagle3" / "config.json").read_text())["eagle_config"][
            "eagle_aux_hidden_state_layer_ids"
        ]
    )
    for ref, row, whole in zip(refs, ROWS, hidden, strict=True):
        raw = stored.load_feature_file(ref.feature_store_uri.removeprefix("file://"))
        assert set(ref.feature_keys) == set(raw)
        found = reader.normalize_offline_sample(raw, 4096)
        assert found["input_ids"].tolist() == [row["input_ids"]]
        assert found["loss_mask"].tolist() == [[*row["loss_mask"][:-1], 0]]
        layers = torch.cat([whole.hidden_states[layer + 1] for layer in told["layers"]], dim=-1)
        torch.testing.assert_close(found["hidden_state"], layers, atol=1e-4, rtol=1e-4)
        assert target.model().head_weight.shape[1] == found["target"].shape[-1]
        torch.testing.assert_close(target.model().logits(found["target"][0]), whole.logits[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["dflash", "domino"])
def test_specforge_reads_what_a_block_draft_is_trained_on(
    target: Target, tmp_path: Path, hidden: list[Any], name: str
) -> None:
    told = write(rows(tmp_path), tmp_path / "features", reading(name, target), max_length=4096)
    family = specforge("specforge.algorithms.common.dflash_family_data")
    refs = family.build_offline_reader(name, str(tmp_path / "features"), run_id="r", ttt_length=7, max_len=4096).read()
    stored = specforge("specforge.runtime.data_plane.feature_store")
    assert len(refs) == len(ROWS)
    for ref, row, whole in zip(refs, ROWS, hidden, strict=True):
        raw = stored.load_feature_file(ref.feature_store_uri.removeprefix("file://"))
        found = family.normalize_offline_sample(raw, 4096)
        assert found["input_ids"].tolist() == [row["input_ids"]]
        layers = torch.cat([whole.hidden_states[layer + 1] for layer in told["layers"]], dim=-1)
        torch.testing.assert_close(found["hidden_states"], layers, atol=1e-4, rtol=1e-4)


def test_a_tree_is_trained_as_the_head_that_it_is(target: Target) -> None:
    draft = open_draft(f"{MODELS / 'eagle3'}:steps=3,topk=2,tokens=4", Opening(CPU, torch.float32), target)
    assert Reading.of(draft, target).layers == reading("eagle3", target).layers


def test_rows_are_cut_and_what_then_teaches_nothing_is_counted(target: Target, tmp_path: Path) -> None:
    short = {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 0, 1]}
    late = {"input_ids": list(range(1, 40)), "loss_mask": [0] * 30 + [1] * 9}
    told = write(rows(tmp_path, short, late), tmp_path / "f", reading("eagle3", target), max_length=30)
    kept = [row for row in ROWS if sum(row["loss_mask"][:30]) >= 2]
    assert (told["rows"], told["left_out"]) == (len(kept), {"nothing_to_learn": 2 + len(ROWS) - len(kept)})
    files = sorted((tmp_path / "f").rglob("*.ckpt"))
    assert [file.relative_to(tmp_path / "f").as_posix() for file in files] == [
        f"rows_0-2000/data_{i}.ckpt" for i in range(len(kept))
    ]
    assert max(len(torch.load(file)["input_ids"]) for file in files) == 30


def test_the_hash_is_of_the_files_and_the_same_again(target: Target, tmp_path: Path) -> None:
    told = [
        write(rows(tmp_path), tmp_path / name, reading("eagle3", target), max_length=4096) for name in ("one", "two")
    ]
    assert told[0] == told[1]
    files = [tmp_path / "one" / "rows_0-2000" / f"data_{i}.ckpt" for i in range(len(ROWS))]
    content = b"".join(file.read_bytes() for file in files)
    assert (hashlib.sha256(content).hexdigest(), len(content)) == (told[0]["sha256"], told[0]["bytes"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "no training row"),
        ('{"input_ids": [], "loss_mask": []}', "no training row"),
        ('{"input_ids": [1.5, 2], "loss_mask": [1, 1]}', "no training row"),
        ('{"conversations": []}', "no training row"),
        ("[", "no training row"),
    ],
)
def test_what_is_no_row_is_named(target: Target, tmp_path: Path, line: str, said: str) -> None:
    path = rows(tmp_path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(RecordError, match=rf"train\.jsonl:{len(ROWS) + 1}: {said}"):
        write(path, tmp_path / "f", reading("eagle3", target), max_length=4096)


def test_tokens_of_another_target_and_drafts_of_another_kind_are_refused(target: Target, tmp_path: Path) -> None:
    strange = {"input_ids": [1, 2048, 3], "loss_mask": [1, 1, 1]}
    with pytest.raises(ModelError, match="a token id that the target does not have"):
        write(rows(tmp_path, strange), tmp_path / "f", reading("eagle3", target), max_length=4096)
    for name in ("chain", "peagle"):
        with pytest.raises(ModelError, match=f"no features for a draft of kind {name}"):
            reading(name, target)


def test_a_disk_without_room_is_known_before_anything_is_computed(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2, 1, 1))
    with pytest.raises(ModelError, match=r"the features take 0\.0 GB, 0\.0 GB are free"):
        write(rows(tmp_path), tmp_path / "f", reading("eagle3", target), max_length=4096)
    assert list((tmp_path / "f").iterdir()) == []
