"""Which target and draft: from folders that are here, and from what a deployment is known for where they are not."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from driftwatch.retrain import identity

MODELS = Path(__file__).parents[2] / "data" / "models"


def test_a_folder_says_what_it_is() -> None:
    found = identity.draft(str(MODELS / "eagle3"), {}, "abc")
    config = (MODELS / "eagle3" / "config.json").read_bytes()
    assert found["config_sha256"] == hashlib.sha256(config).hexdigest()
    assert (found["strategy"], found["sha256"]) == ("eagle3", "abc")
    target = identity.target(str(MODELS / "target"), {"target_revision": "v2", "dtype": "bfloat16"})
    assert (target["revision"], target["dtype"], target["vocab_size"]) == ("v2", "bfloat16", 2048)
    assert target["tokenizer_sha256"] is not None


@pytest.mark.parametrize("path", [None, "/not/here"])
def test_what_is_not_here_is_unknown(path: str | None) -> None:
    found = identity.target(path, {"target": "org/model"})
    assert (found["model"], found["config_sha256"], found["vocab_size"]) == ("org/model", None, None)


@pytest.mark.parametrize(
    ("config", "strategy"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "eagle3"),
        ({"architectures": ["DFlashDraftModel"]}, "dflash"),
        ({"architectures": ["DominoDraftModel"]}, "domino"),
        ({"architectures": ["PEagleDraftModel"], "draft_vocab_size": 32000}, None),
        ({"architectures": ["LlamaForCausalLM"]}, None),
        ({}, None),
    ],
)
def test_what_specforge_trains_is_named(config: dict[str, object], strategy: str | None) -> None:
    assert identity.strategy(config) == strategy


def test_a_head_that_is_served_as_a_tree_is_the_head_in_its_folder() -> None:
    tree = "steps=5,topk=4,tokens=8"
    found, plain = (identity.draft(path, {}, None) for path in (f"{MODELS / 'eagle3'}:{tree}", str(MODELS / "eagle3")))
    assert found == plain | {"tree": tree}
    assert (found["strategy"], plain["tree"]) == ("eagle3", None)
    away = identity.draft("/of/another/machine: topk=4,steps=5,tokens=8", {}, None)
    assert (away["path"], away["tree"]) == ("/of/another/machine", tree), "as fingerprints write it"
    named = identity.draft("ngram:min=1,max=3", {}, None)
    assert (named["path"], named["tree"], named["strategy"]) == ("ngram:min=1,max=3", None, None)


def test_a_folder_whose_name_ends_like_a_tree_is_a_folder(tmp_path: Path) -> None:
    odd = tmp_path / "head:steps=5,topk=4,tokens=8"
    odd.mkdir()
    found = identity.draft(str(odd), {}, None)
    assert (found["path"], found["tree"]) == (str(odd), None)


def test_the_output_head_of_a_target_is_named(tmp_path: Path) -> None:
    assert identity.target(str(MODELS / "target"), {})["lm_head_key"] == "lm_head.weight"
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    assert identity.target(str(tmp_path), {})["lm_head_key"] == "model.embed_tokens.weight"
    assert identity.target("/nowhere", {})["lm_head_key"] is None
