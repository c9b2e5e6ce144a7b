"""Targets of several families: the layers a draft reads and the logits are those of the family's own forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from driftwatch.errors import ModelError
from driftwatch.shadow.causal import Causal
from driftwatch.shadow.target import Target

from .conftest import CPU, DATA

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
    target = Target(DATA / "models" / "target", device=CPU, dtype=torch.bfloat16, device_map={"": "cpu"})
    assert target.model().embedding.dtype == torch.bfloat16
    assert target.model().layers == 8
