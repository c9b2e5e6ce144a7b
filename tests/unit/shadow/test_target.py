"""Targets of several families and forms: the layers a draft reads and the logits are those of their own forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from driftwatch.cli.candidate import candidate
from driftwatch.cli.doctor import doctor
from driftwatch.cli.replay import replay
from driftwatch.cli.retrain import retrain
from driftwatch.errors import ModelError
from driftwatch.settings import Settings
from driftwatch.shadow.causal import Causal
from driftwatch.shadow.eagle3.checkpoint import Checkpoint
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.target import Target
from driftwatch.shadow.worker import Worker
from driftwatch.store.connection import Store

from .conftest import CPU, DATA, tokens_of, trace

STORED = DATA / "models" / "target"

LAYERS = 4
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 6, "query_pre_attn_scalar": 8},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "gpt2": {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 128},
}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    shape = {} if family == "gpt2" else SHAPE
    config = AutoConfig.for_model(family, **(shape | {"vocab_size": 64} | FAMILIES[family]))
    build: Any = AutoModelForCausalLM
    return build.from_config(config).float().eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefill_tokens", [10_000, 16])
def test_layers_and_logits(family: str, prefill_tokens: int) -> None:
    """In one pass and in pieces through a cache; index N is the last layer before the final norm, taken by a hook."""
    model = model_of(family)
    causal = Causal(model, prefill_tokens=prefill_tokens)
    causal.check_logits()
    ids = torch.randint(3, 64, (2, 21), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = model(ids, output_hidden_states=True, use_cache=False)
        pieces = list(causal.prefill(ids, capture=(0, 2, LAYERS - 1), reduce=lambda parts: torch.cat(parts, -1)))
        captured = torch.cat([kept for _, kept, _ in pieces if kept is not None], dim=1)
        last = torch.cat([final for _, _, final in pieces if final is not None], dim=1)
        logits = causal.logits(last.view(42, -1)).view(2, 21, -1)
        stopped = list(causal.prefill(ids, capture=(0, 2, LAYERS - 1), reduce=lambda parts: parts[-1], final=False))
    assert len(pieces) == (1 if prefill_tokens > 42 else 3)
    expected = torch.cat([whole.hidden_states[i] for i in (0, 2, LAYERS - 1)], dim=-1)
    torch.testing.assert_close(captured, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits, whole.logits, atol=1e-4, rtol=1e-4)
    early = torch.cat([kept for _, kept, _ in stopped if kept is not None], dim=1)
    torch.testing.assert_close(early, whole.hidden_states[LAYERS - 1], atol=1e-4, rtol=1e-4)
    assert all(final is None for _, _, final in stopped)
    assert len(causal.backbone.h if family == "gpt2" else causal.backbone.layers) == LAYERS


def test_a_family_with_a_scaling_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    plain = model.forward

    def scaled(*arguments: Any, **options: Any) -> Any:
        found = plain(*arguments, **options)
        found.logits = found.logits * 3
        return found

    monkeypatch.setattr(model, "forward", scaled)
    with pytest.raises(ModelError, match="scales its logits in a way not known here"):
        Causal(model).check_logits()


def test_a_target_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="target .*nowhere") as caught:
        Target(tmp_path / "nowhere", device=CPU, dtype=torch.float32).model()
    assert "\n" not in str(caught.value)


def test_a_device_map_goes_to_transformers() -> None:
    target = Target(STORED, device=CPU, dtype=torch.bfloat16, device_map={"": "cpu"})
    assert target.model().embedding.dtype == torch.bfloat16
    assert target.model().layers == 8


@pytest.mark.parametrize("device_map", ["auto", "balanced", "sequential"])
def test_a_spread_target_gives_the_same_weights(eagle3: Checkpoint, target: Target, device_map: str) -> None:
    """As far as one device can show it."""
    spread = Target(STORED, device=CPU, dtype=torch.float32, device_map=device_map)
    samples = [tokens_of(record) for record in trace("eagle3.T0")[:3]]
    expected = Eagle3Draft(eagle3, target, depths=3, agreement=True).replay(samples)
    found = Eagle3Draft(eagle3, spread, depths=3, agreement=True).replay(samples)
    assert [one.values.tolist() for one in found] == [one.values.tolist() for one in expected]


def test_the_settings_device_map_reaches_transformers(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the worker and the commands that load a target: each refuses a map that transformers does not know."""
    draft = str(DATA / "models" / "eagle3")
    model = {"name": "*", "target": str(STORED), "drafts": [{"path": draft}]}
    with pytest.raises(ModelError, match="target .*nonsense"):
        Worker(Settings(models=[model], shadow={"device": "cpu", "device_map": "nonsense"}), sqlite_store)
    monkeypatch.setenv("DRIFTWATCH_SHADOW__DEVICE_MAP", "nonsense")
    options = ["--draft", draft, "--target", str(STORED)]
    records = str(DATA / "traces" / "eagle3.T0.jsonl")
    training = ["features", "--data", records, "--out", str(tmp_path / "out"), *options]
    compared = ["compare", records, "--incumbent", draft, "--candidate", draft, "--target", str(STORED)]
    for command, arguments in ((replay, [records, *options]), (candidate, compared), (retrain, training)):
        done = CliRunner().invoke(command, arguments)
        assert isinstance(done.exception, ModelError)
        assert "nonsense" in str(done.exception)
    assert "nonsense" in CliRunner().invoke(doctor, options).output


def as_gguf(folder: Path, quantised: gguf.GGMLQuantizationType | None) -> Path:
    """The fixture target as llama.cpp's converter writes it; query and key rows are in its rotary order."""
    config = json.loads((STORED / "config.json").read_text())
    writer = gguf.GGUFWriter(folder / "target.gguf", "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(STORED / "model.safetensors").items():
        values = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
        known_as = names.get_name(name, try_suffixes=(".weight",)) or name
        if quantised is None or values.ndim == 1:
            writer.add_tensor(known_as, values)
        else:
            writer.add_tensor(known_as, gguf.quantize(values, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "target.gguf"


def as_bitsandbytes(folder: Path, **options: Any) -> Path:
    load: Any = AutoModelForCausalLM
    quantisation: Any = BitsAndBytesConfig
    model = load.from_pretrained(STORED, dtype=torch.float32, quantization_config=quantisation(**options))
    model.save_pretrained(folder)
    return folder


def as_fp8(folder: Path) -> Path:
    """Blocks of 128 x 128 with a scale each, as FP8 checkpoints are published."""
    config = json.loads((STORED / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(STORED / "model.safetensors").items():
        tensors[name] = tensor
        if tensor.ndim == 2 and ".layers." in name:
            blocks = tensor.float().view(tensor.shape[0] // 128, 128, tensor.shape[1] // 128, 128)
            scale = blocks.abs().amax((1, 3)) / 448
            tensors[name] = (blocks / scale[:, None, :, None]).view(tensor.shape).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


FORMS: dict[str, tuple[Any, float]] = {
    "gguf, float32": (lambda folder: as_gguf(folder, None), 1.0),
    "gguf, Q8_0": (lambda folder: as_gguf(folder, gguf.GGMLQuantizationType.Q8_0), 0.98),
    "gguf, Q4_0": (lambda folder: as_gguf(folder, gguf.GGMLQuantizationType.Q4_0), 0.85),
    "bitsandbytes, int8": (lambda folder: as_bitsandbytes(folder, load_in_8bit=True), 0.98),
    "bitsandbytes, nf4": (lambda folder: as_bitsandbytes(folder, load_in_4bit=True, bnb_4bit_quant_type="nf4"), 0.85),
    "fp8 in blocks": (as_fp8, 0.98),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_head_on_a_quantised_target(eagle3: Checkpoint, target: Target, tmp_path: Path, form: str) -> None:
    """The layers read are the library's own, and the weights those of the plain target up to its rounding."""
    write, share = FORMS[form]
    other = Target(write(tmp_path), device=CPU, dtype=torch.float32)
    samples = [tokens_of(record) for record in trace("eagle3.T0")[::12]]
    ids = torch.tensor([list(samples[0].prompt)])
    with torch.inference_mode():
        whole = other.model().model(ids, output_hidden_states=True, use_cache=False).hidden_states
        ((_, found, _),) = other.model().prefill(ids, capture=(0, 2, 5), reduce=torch.stack)
    assert found is not None
    for kept, layer in zip(found, (0, 2, 5), strict=True):
        torch.testing.assert_close(kept, whole[layer])
    theirs = Eagle3Draft(eagle3, other, depths=3, agreement=True).measure(samples)
    ours = Eagle3Draft(eagle3, target, depths=3, agreement=True).measure(samples)
    equal = np.concatenate([a.values == b.values for (a, _), (b, _) in zip(theirs, ours, strict=True)])
    surprise = [sum(one.logprob for _, one in found if one is not None) for found in (theirs, ours)]
    print(f"{form}: {equal.mean():.3f} of {equal.size} weights equal, logprob {surprise[0]:.1f} and {surprise[1]:.1f}")
    assert equal.mean() >= share
    assert surprise[0] == pytest.approx(surprise[1], rel=0.001 if share == 1 else 0.15)
