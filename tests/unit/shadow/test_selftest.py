"""Wrong loadings are caught, by the loader or on text that the target wrote, and their cause is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from driftwatch.cli.doctor import doctor
from driftwatch.settings import Shadow
from driftwatch.shadow.checkup import checkup
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.eagle3.checkpoint import Checkpoint, read_checkpoint
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.selftest import own_text, self_test
from driftwatch.shadow.target import Target
from driftwatch.shadow.tokenizer import Retokeniser

from .conftest import DATA
from .test_eagle3_loader import FORMS, Config, Tensors, stored, with_target_embedding, written

TARGET = DATA / "models" / "target"


@pytest.fixture(scope="module")
def text(target: Target) -> list[Tokens]:
    return own_text(target, Retokeniser(TARGET))


def test_a_good_head_fits_as_it_is_loaded(eagle3: Checkpoint, target: Target, text: list[Tokens]) -> None:
    fit = self_test(Eagle3Draft(eagle3, target, depths=4), target, text, batch_tokens=16_384)
    print(f"{fit.tokens} tokens, {fit.hits:.3f} accepted, chance {fit.chance:.3f}")
    assert fit.works
    assert fit.tokens == 12 * 47
    assert fit.better is None


def layers_too_high(config: Config, tensors: Tensors) -> None:
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]


def layers_too_low(config: Config, tensors: Tensors) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]


def residual_flag(config: Config, tensors: Tensors) -> None:
    config["norm_before_residual"] = True


def output_flag(config: Config, tensors: Tensors) -> None:
    config["norm_output"] = True


def concatenation(config: Config, tensors: Tensors) -> None:
    for name in "qkv":
        key = f"midlayer.self_attn.{name}_proj.weight"
        tensors[key] = tensors[key].roll(128, dims=1)


def rope_of_the_target(config: Config, tensors: Tensors) -> None:
    config["rope_parameters"] = {"rope_theta": 3.0, "rope_type": "default"}


def other_revision(config: Config, tensors: Tensors) -> None:
    embedding = with_target_embedding(tensors)["embed_tokens.weight"]
    noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(1)) * embedding.float().std()
    tensors["embed_tokens.weight"] = (embedding + 1.5 * noise).to(embedding.dtype)


CORRUPTIONS: dict[str, tuple[Callable[[Config, Tensors], None], str]] = {
    "layer ids one too high": (layers_too_high, r"layer ids are one too high: .* hidden_states \[2, 4, 5\]"),
    "layer ids one too low": (layers_too_low, r"layer ids are one too low: .* hidden_states \[2, 4, 5\]"),
    "residual norm flag": (residual_flag, "norm_before_residual is missing or wrong"),
    "output norm flag": (output_flag, "norm_output is missing or wrong"),
    "concatenation swapped": (concatenation, "the concatenation is swapped"),
    "rope": (rope_of_the_target, "rope_theta is missing or wrong"),
    "embedding of another revision": (other_revision, "embed_tokens.weight is not what it was trained with"),
}


@pytest.mark.parametrize("how", CORRUPTIONS)
def test_a_wrong_loading_is_named(target: Target, text: list[Tokens], tmp_path: Path, how: str) -> None:
    corrupt, cause = CORRUPTIONS[how]
    config, tensors = stored()
    corrupt(config, tensors)
    draft = Eagle3Draft(read_checkpoint(written(tmp_path / "head", config, tensors)), target, depths=4)
    fit = self_test(draft, target, text, batch_tokens=16_384)
    assert fit.better is not None
    reading, score, loaded, errors = fit.better
    print(f"{how}: {reading.name}, {score:.3f} against {loaded:.3f}, {errors:.1f} standard errors")
    with pytest.raises(AssertionError, match=cause):
        raise AssertionError(reading.cause)


def test_a_random_head_is_no_better_than_chance(eagle3: Checkpoint, target: Target, text: list[Tokens]) -> None:
    draws = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(value.shape, generator=draws) for name, value in eagle3.tensors.items()}
    draft = Eagle3Draft(dataclasses.replace(eagle3, tensors=tensors), target, depths=4)
    assert not self_test(draft, target, text, batch_tokens=16_384).works


def lines(draft: Path, **options: Any) -> list[tuple[str, str]]:
    shadow = Shadow(device="cpu", dtype="float32")
    return list(checkup(shadow, str(draft), options.get("target", TARGET), TARGET, options.get("records")))


def test_doctor_says_what_a_head_is() -> None:
    found = lines(DATA / "models" / "eagle3")
    said = "\n".join(f"{level} {text}" for level, text in found)
    assert "from SpecForge: hidden 128" in said
    assert "reads hidden_states [2, 4, 5] of 8 layers; 1,024 of 2,048 token ids" in said
    assert "ok inferred: no embed_tokens.weight" in said
    assert "warning vLLM misreads this checkpoint" in said
    assert "of its first proposals accepted on 564 tokens of text that the target wrote" in said
    assert "problem" not in said


@pytest.mark.parametrize("form", FORMS)
def test_doctor_says_what_every_form_is(tmp_path: Path, form: str) -> None:
    """Its trainer, the layers it reads, and each thing that was inferred or ignored or that an engine would misread."""
    write, origin, _ = FORMS[form]
    folder = write(tmp_path / "head")
    checkpoint = read_checkpoint(folder)
    found = lines(folder)
    assert any(text.startswith("eagle3 draft, ") for _, text in found)
    assert any(text.startswith(f"from {origin}: hidden 128") and "[2, 4, 5] of 8" in text for _, text in found)
    for note in checkpoint.inferred:
        assert ("ok", f"inferred: {note}") in found
    for name in checkpoint.ignored:
        assert ("ok", f"ignored: {name}") in found
    for warning in checkpoint.warnings:
        assert ("warning", warning) in found
    assert checkpoint.inferred or checkpoint.ignored or form == "speculators"  # whose config.json says everything
    assert not any(level == "problem" for level, _ in found)


def test_doctor_says_what_a_chain_and_an_ngram_are() -> None:
    found = lines(DATA / "models" / "chain")
    assert ("ok", "LlamaForCausalLM: hidden 96, layers 1; proposes the target's ids as they are") in found
    assert any(level == "ok" and "accepted on 564 tokens" in text for level, text in found)
    ((level, text),) = lines(Path("ngram:min=1,max=3"))
    assert (level, text.partition(",")[0]) == ("ok", "ngram draft")


def test_doctor_names_an_embedding_of_another_revision(tmp_path: Path) -> None:
    config, tensors = stored()
    other_revision(config, tensors)
    said = lines(written(tmp_path / "head", config, tensors))
    assert (
        "warning",
        "its embed_tokens.weight differs from the target's in 2,048 rows: it was exported with the "
        "embedding of another revision of the target",
    ) in said
    assert any(level == "problem" and "embed_tokens.weight is not what" in text for level, text in said)


def test_doctor_command_fails_on_a_wrong_head(tmp_path: Path) -> None:
    config, tensors = stored()
    residual_flag(config, tensors)
    wrong = written(tmp_path / "head", config, tensors)
    arguments = ["--target", str(TARGET), "--draft"]
    done = CliRunner().invoke(doctor, [*arguments, str(wrong)])
    assert done.exit_code == 1
    assert "norm_before_residual is missing or wrong in config.json" in done.output
    done = CliRunner().invoke(doctor, [*arguments, str(DATA / "models" / "eagle3")])
    assert done.exit_code == 0, done.output


def test_doctor_tries_a_draft_on_records() -> None:
    found = lines(DATA / "models" / "chain", records=DATA / "traces" / "draft3.T0.jsonl")
    assert any("4,032 tokens of records" in text and level == "ok" for level, text in found)


def test_a_target_that_is_only_a_tokenizer_leaves_a_chain_untried(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((TARGET / name).read_bytes())
    found = lines(DATA / "models" / "chain", target=tmp_path)
    assert [level for level, _ in found] == ["ok", "ok", "warning"]
    assert "not tried out, since the target cannot be loaded" in found[-1][1]


def test_without_a_tokenizer_the_text_begins_at_random(target: Target) -> None:
    samples = own_text(target, None)
    assert all(len(one.output) == 48 for one in samples)
