"""Every trainer's form of one head loads to the same results; what is not whole or not consistent is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from driftwatch.errors import ModelError
from driftwatch.shadow import config as draft_config
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.eagle3.checkpoint import Checkpoint, read_checkpoint
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.eagle3.spec import Rope, default_layers
from driftwatch.shadow.open import kind_of
from driftwatch.shadow.target import Target

from .conftest import DATA, tokens_of, trace

HEAD = DATA / "models" / "eagle3"
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


def stored() -> tuple[Config, Tensors]:
    config: Config = json.loads((HEAD / "config.json").read_text())
    return config, load_file(HEAD / "model.safetensors")


def written(folder: Path, config: Config, tensors: Tensors, *, binary: bool = False) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    whole = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    if binary:
        torch.save(whole, folder / "pytorch_model.bin")
    else:
        save_file(whole, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_target_embedding(tensors: Tensors) -> Tensors:
    embedding = load_file(DATA / "models" / "target" / "model.safetensors")["model.embed_tokens.weight"]
    return tensors | {"embed_tokens.weight": embedding}


def as_specforge_hf(folder: Path) -> Path:
    config, tensors = stored()
    return written(folder, config, with_target_embedding(tensors))


def as_served_by_vllm(folder: Path) -> Path:
    config: Config = json.loads((HEAD / "config.vllm.json").read_text())
    return written(folder, config, stored()[1])


def as_official(folder: Path) -> Path:
    """Reads the default layers, which of this target are not the head's: compared on the head with those."""
    config, tensors = stored()
    del config["eagle_config"]
    return written(folder, config | {"architectures": ["LlamaForCausalLM"]}, tensors, binary=True)


def as_speculators(folder: Path) -> Path:
    config, tensors = stored()
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    layer = {key: value for key, value in config.items() if key not in ("eagle_config", "draft_vocab_size")}
    outer = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 1024,
        "norm_before_residual": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "target"}},
    }
    return written(folder, outer, with_target_embedding(renamed))


def as_model_optimizer(folder: Path) -> Path:
    config, tensors = stored()
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items() if name != "t2d"}
    renamed["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    return written(folder, config, renamed)


FORMS: dict[str, tuple[Callable[[Path], Path], str, tuple[int, ...] | None]] = {
    "specforge hf": (as_specforge_hf, "SpecForge", (2, 4, 5)),
    "vllm": (as_served_by_vllm, "SpecForge", (2, 4, 5)),
    "official": (as_official, "EAGLE", None),
    "speculators": (as_speculators, "speculators", (2, 4, 5)),
    "model-optimizer": (as_model_optimizer, "Model-Optimizer", (2, 4, 5)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_results(eagle3: Checkpoint, target: Target, tmp_path: Path, form: str) -> None:
    write, origin, aux = FORMS[form]
    folder = write(tmp_path / "head")
    assert kind_of(folder) == "eagle3"
    checkpoint = read_checkpoint(folder)
    assert checkpoint.spec.origin == origin
    assert checkpoint.spec.aux == aux
    samples = [tokens_of(record) for record in trace("eagle3.T0")[:12]]
    if aux is None:
        assert default_layers(8) == (2, 4, 5)  # the head's layers are the default of a target with eight
    expected = Eagle3Draft(eagle3, target, depths=4).replay(samples)
    for found, wanted in zip(Eagle3Draft(checkpoint, target, depths=4).replay(samples), expected, strict=True):
        np.testing.assert_array_equal(found.values, wanted.values)
    assert sum(weights.values.sum() for weights in expected) > 100


def test_what_was_inferred_and_ignored_is_said(tmp_path: Path, eagle3: Checkpoint) -> None:
    assert any("hidden_states [2, 4, 5]" in note for note in eagle3.inferred)
    assert any("vLLM misreads" in warning for warning in eagle3.warnings)
    assert read_checkpoint(as_model_optimizer(tmp_path / "a")).ignored == ("layers.0.self_attn.rotary_emb.inv_freq",)
    assert read_checkpoint(as_served_by_vllm(tmp_path / "b")).warnings == ()


def test_top_level_ids_that_contradict_the_others_are_warned_of(tmp_path: Path) -> None:
    config, tensors = stored()
    config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]
    checkpoint = read_checkpoint(written(tmp_path / "head", config, tensors))
    assert checkpoint.spec.aux == (1, 3, 4)
    assert any("do not name the same layers" in warning for warning in checkpoint.warnings)


def edited(change: Callable[[Config, Tensors], None]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        config, tensors = stored()
        change(config, tensors)
        return written(folder, config, tensors)

    return write


def without(name: str) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        config.pop(name, None)
        tensors.pop(name, None)

    return change


def absolute_ids(config: Config, tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(1024)


def unset_map(config: Config, tensors: Tensors) -> None:
    tensors["d2t"] = torch.zeros(1024, dtype=torch.int64)
    tensors["t2d"] = torch.ones(2048, dtype=torch.bool)


def other_map(config: Config, tensors: Tensors) -> None:
    tensors["t2d"] = tensors["t2d"].roll(1)


def quantised(folder: Path) -> Path:
    config, tensors = stored()
    written(folder, config, tensors)
    (folder / "hf_quant_config.json").write_text("{}")
    return folder


BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a tensor too many": (
        edited(lambda config, tensors: tensors.update({"midlayer.extra.weight": torch.zeros(2)})),
        "1 tensors belong to no part of it, the first is midlayer.extra.weight",
    ),
    "a tensor too few": (
        edited(without("midlayer.hidden_norm.weight")),
        "tensor hidden_norm.weight is missing",
    ),
    "no last norm": (edited(without("norm.weight")), "norm.weight is missing"),
    "ids for offsets": (edited(absolute_ids), "d2t holds target ids where engines expect offsets"),
    "map never loaded": (edited(unset_map), "vocabulary map was never loaded"),
    "map of another": (edited(other_map), "d2t and t2d do not name the same 1024"),
    "no map": (edited(without("d2t")), "no d2t says which ones"),
    "flag without norm": (edited(lambda config, tensors: config.update(norm_before_fc=True)), "input_norm.weight is"),
    "shape": (
        edited(lambda config, tensors: config.update(head_dim=16)),
        "tensor self_attn.q_proj.weight has shape",
    ),
    "heads": (
        edited(without("num_attention_heads")),
        "num_attention_heads is None",
    ),
    "layers": (edited(lambda config, tensors: config.update(num_hidden_layers=2)), "num_hidden_layers is 2"),
    "rope": (
        edited(lambda config, tensors: config.update(rope_parameters={"rope_type": "longrope", "factor": 2})),
        "rotary embedding of type 'longrope' is not known",
    ),
    "vocabulary": (edited(lambda config, tensors: config.update(draft_vocab_size=999)), "draft_vocab_size is 999"),
    "quantised": (quantised, "it is quantised"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, how: str) -> None:
    write, message = BROKEN[how]
    folder = write(tmp_path / "head")
    with pytest.raises(ModelError, match=message) as caught:
        read_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_trained_norms_are_applied_where_a_flag_is_missing(tmp_path: Path) -> None:
    config, tensors = stored()
    tensors |= {f"fc_norm.{i}.weight": torch.ones(128) for i in range(3)}
    checkpoint = read_checkpoint(written(tmp_path / "head", config, tensors))
    assert checkpoint.spec.fc_norm
    assert any("config.json lacks fc_norm: true" in warning for warning in checkpoint.warnings)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    folder = written(tmp_path / "head", stored()[0], {}, binary=False)
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Attack()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        read_checkpoint(folder)
    assert not (tmp_path / "ran").exists()


def test_a_head_of_another_target_is_refused(eagle3: Checkpoint, tmp_path: Path) -> None:
    other = Target(DATA / "models" / "chain", device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(ModelError, match="it reads layers 128 wide, the target's are 96"):
        Eagle3Draft(eagle3, other, depths=1)
    config, tensors = stored()
    config["eagle_aux_hidden_state_layer_ids"] = [2, 4, 50]
    far = read_checkpoint(written(tmp_path / "head", config, tensors))
    target = Target(DATA / "models" / "target", device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(ModelError, match=r"reads target layers \[2, 4, 50\], the target has 8 layers"):
        Eagle3Draft(far, target, depths=1)


@pytest.mark.parametrize(
    "scaling",
    [
        {},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    ],
)
def test_rotary_types_are_those_of_transformers(scaling: Config) -> None:
    config = {"rope_theta": 500_000.0, "rope_scaling": scaling or None, "max_position_embeddings": 2048}
    inverse, factor = Rope.from_config(draft_config.Config(config, "draft")).frequencies(32)
    plain = 1 / 500_000 ** (torch.arange(0, 32, 2).float() / 32)
    assert inverse.shape == (16,)
    match scaling.get("rope_type"):
        case None:
            torch.testing.assert_close(inverse, plain)
        case "linear":
            torch.testing.assert_close(inverse, plain / 2)
        case "dynamic":  # the base that vLLM computes once, for max_position_embeddings x factor
            base = 500_000 * (2 * 2 - 1) ** (32 / 30)
            torch.testing.assert_close(inverse, 1 / base ** (torch.arange(0, 32, 2).float() / 32))
        case "llama3":
            torch.testing.assert_close(inverse[:4], plain[:4])
            torch.testing.assert_close(inverse[-2:], plain[-2:] / 8)
        case "yarn":
            assert factor == pytest.approx(0.1 * np.log(4) + 1)
            torch.testing.assert_close(inverse[-1:], plain[-1:] / 4)


def test_without_a_theta_it_is_ten_thousand() -> None:
    assert Rope.from_config(draft_config.Config({"rope_scaling": None}, "draft")).theta == 10_000
    assert (
        Rope.from_config(
            draft_config.Config({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, "draft")
        ).theta
        == 7
    )
    assert (
        Rope.from_config(draft_config.Config({"rope_theta": 5.0, "rope_scaling": {"type": "mrope"}}, "draft")).scaling
        == {}
    )


def test_short_and_foreign_samples_say_why(eagle3: Checkpoint, target: Target) -> None:
    draft = Eagle3Draft(eagle3, target, depths=2, rule="rejection")
    samples = [Tokens([1], [2], 0.5), Tokens([], [2, 3], 0.5), Tokens([1], [2, 5000], 0.5), Tokens([1], [2, 3])]
    reasons = [draft.skip_reason(sample) for sample in samples]
    assert reasons == ["too_short", "too_short", "outside_vocabulary", "sampling_unknown"]
    assert draft.skip_reason(Tokens([1], [2, 3], 0.5)) is None
