"""Random DFlash, P-EAGLE and MTP checkpoints, and what each proposes written out window by window.

Layers, norms and rotary tables are those of transformers; every window is computed alone, over all that it sees.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

QWEN3: Any = modeling_qwen3

HIDDEN, VOCABULARY = 128, 2048
"""Of the target in tests/data."""

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]

BASE: Config = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rope_theta": 10_000.0,
}


def random(shapes: Iterable[tuple[str, tuple[int, ...]]], seed: int, *, around: float = 1.0) -> Tensors:
    """Matrices of small numbers, vectors of numbers around that of a norm which does nothing."""
    draws = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes:
        values = torch.randn(shape, generator=draws)
        found[name] = values * 0.1 if len(shape) > 1 else values * 0.2 + around
    return found


def written(folder: Path, config: Config, tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def layer_shapes(prefix: str, config: Config, width: int, *, qk_norm: bool, gated: bool = False) -> list[Any]:
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes: list[Any] = [("self_attn.q_proj", (query * (1 + gated), width)), ("self_attn.k_proj", (keys, width))]
    shapes += [("self_attn.v_proj", (keys, width)), ("self_attn.o_proj", (hidden, query))]
    shapes += [("mlp.gate_proj", (inner, hidden)), ("mlp.up_proj", (inner, hidden)), ("mlp.down_proj", (hidden, inner))]
    norms: list[Any] = [("input_layernorm", (hidden,)), ("post_attention_layernorm", (hidden,))]
    norms += [("self_attn.q_norm", (size,)), ("self_attn.k_norm", (size,))] if qk_norm else []
    return [(f"{prefix}{name}.weight", shape) for name, shape in (*shapes, *norms)]


def dflash(seed: int = 0, **changes: Any) -> tuple[Config, Tensors]:
    config = BASE | {"architectures": ["DFlashDraftModel"], "block_size": 5, "num_target_layers": 8} | changes
    config.setdefault("dflash_config", {"mask_token_id": 9, "target_layer_ids": [0, 4, 6]})
    count = len(config["dflash_config"]["target_layer_ids"])
    shapes: list[Any] = [
        ("fc.weight", (HIDDEN, count * HIDDEN)),
        ("hidden_norm.weight", (HIDDEN,)),
        ("norm.weight", (HIDDEN,)),
    ]
    for i in range(config["num_hidden_layers"]):
        shapes += layer_shapes(f"layers.{i}.", config, HIDDEN, qk_norm=True)
    return config, random(shapes, seed)


def domino(seed: int = 0, **changes: Any) -> tuple[Config, Tensors]:
    method: Config = {"mask_token_id": 9, "target_layer_ids": [0, 4, 6], "projector_type": "domino", "emb_dim": 12}
    method |= {"gru_hidden_dim": 20, "pure_draft_prefix_len": 1, "shift_label": True} | changes.pop("method", {})
    config, tensors = dflash(seed, architectures=["DominoDraftModel"], dflash_config=method, **changes)
    state, width = method["gru_hidden_dim"], method["emb_dim"]
    shapes = [("prefix_gru.weight_ih_l0", (3 * state, HIDDEN)), ("prefix_gru.weight_hh_l0", (3 * state, state))]
    shapes += [("embed_proj.0.weight", (width, HIDDEN + state)), ("embed_proj.2.weight", (VOCABULARY, width))]
    return config, tensors | random(shapes, seed + 1)


def peagle(seed: int = 0, **changes: Any) -> tuple[Config, Tensors]:
    config = BASE | {"architectures": ["PEagleDraftModel"], "pard_token": 9, "draft_vocab_size": 256} | changes
    config.setdefault("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]})
    hidden, rows = config["hidden_size"], config["draft_vocab_size"]
    width = config.setdefault("target_hidden_size", HIDDEN)
    shapes: list[Any] = [
        ("fc.weight", (hidden, 3 * width)),
        ("mask_hidden", (1, 1, 3 * width)),
        ("norm.weight", (hidden,)),
    ]
    shapes += [("embed_tokens.weight", (VOCABULARY, hidden)), ("lm_head.weight", (rows, hidden))]
    shapes += [("layers.0.hidden_norm.weight", (hidden,))]
    for i in range(config["num_hidden_layers"]):
        shapes += layer_shapes(f"layers.{i}.", config, hidden * (2 if i == 0 else 1), qk_norm=False)
    tensors = random(shapes, seed)
    ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))[:rows].sort().values
    tensors["d2t"] = ids - torch.arange(rows)
    tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, ids, True)
    return config, tensors


def mtp(seed: int = 0, **changes: Any) -> tuple[Config, Tensors]:
    config = BASE | {"architectures": ["Qwen3_5MTPDraftModel"], "num_hidden_layers": 1, "attn_output_gate": True}
    config = config | {"partial_rotary_factor": 0.25} | changes
    shapes: list[Any] = [("mtp.fc.weight", (HIDDEN, 2 * HIDDEN))]
    shapes += [(f"mtp.{name}.weight", (HIDDEN,)) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")]
    shapes += layer_shapes("mtp.layers.0.", config, HIDDEN, qk_norm=True, gated=config["attn_output_gate"])
    return config, random(shapes, seed, around=0.0)


def part(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def filled(module: Any, tensors: Tensors) -> Any:
    module.load_state_dict(tensors)
    return module.eval()


def causal(length: int) -> torch.Tensor:
    return torch.full((length, length), float("-inf")).triu(1)[None, None]


def dflash_block(
    config: Config, tensors: Tensors, layers: torch.Tensor, embedding: torch.Tensor, x: list[int], a: int
) -> torch.Tensor:
    """[B, hidden]: one block at anchor a, its keys those of the context before it and its own, under a mask."""
    make: Any = Qwen3Config
    known = {key: value for key, value in config.items() if key not in ("layer_types", "sliding_window")}
    qwen = make(**known)
    block, size = config["block_size"], config["head_dim"]
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]

    def norm(name: str, values: torch.Tensor) -> torch.Tensor:
        weight = tensors[f"{name}.weight"]
        found: torch.Tensor = filled(QWEN3.Qwen3RMSNorm(len(weight), eps=config["rms_norm_eps"]), {"weight": weight})(
            values
        )
        return found

    context = norm("hidden_norm", layers[:a] @ tensors["fc.weight"].T)
    mask_id = config["dflash_config"]["mask_token_id"]
    h = embedding[[x[a], *[mask_id] * (block - 1)]]
    positions = torch.tensor([[*range(a), *range(a, a + block)]])
    rotary = QWEN3.Qwen3RotaryEmbedding(qwen)
    cos, sin = (table[0] for table in rotary(h[None], positions))
    for i, kind in enumerate(kinds):
        name = f"layers.{i}."
        normed = norm(f"{name}input_layernorm", h)
        everything = torch.cat([context, normed])

        def heads(what: str, inputs: torch.Tensor, name: str = name) -> torch.Tensor:
            return (inputs @ tensors[f"{name}self_attn.{what}.weight"].T).view(len(inputs), -1, size)

        q = norm(f"{name}self_attn.q_norm", heads("q_proj", normed)).transpose(0, 1)
        k = norm(f"{name}self_attn.k_norm", heads("k_proj", everything)).transpose(0, 1)
        v = heads("v_proj", everything).transpose(0, 1)
        q = q * cos[a:] + QWEN3.rotate_half(q) * sin[a:]
        k = k * cos + QWEN3.rotate_half(k) * sin
        groups = q.shape[0] // k.shape[0]
        scores = q @ k.repeat_interleave(groups, 0).transpose(1, 2) * size**-0.5
        if kind == "sliding_attention":
            apart = torch.arange(a, a + block)[:, None] - torch.arange(a + block)
            outside = (apart < 0) | ((apart >= config["sliding_window"]) & (torch.arange(a + block) < a))
            scores = scores.masked_fill(outside, float("-inf"))
        mixed = (scores.softmax(-1) @ v.repeat_interleave(groups, 0)).transpose(0, 1).reshape(block, -1)
        h = h + mixed @ tensors[f"{name}self_attn.o_proj.weight"].T
        mlp = filled(QWEN3.Qwen3MLP(qwen), part(tensors, f"{name}mlp."))
        h = h + mlp(norm(f"{name}post_attention_layernorm", h))
    return norm("norm", h)


def domino_block(config: Config, tensors: Tensors, slots: torch.Tensor, fed: torch.Tensor) -> torch.Tensor:
    """[proposals, hidden + E]: the slots that propose, each with its correction from the tokens before it [.., H]."""
    method = config["dflash_config"]
    slots = slots if method["shift_label"] else slots[1:]
    cell = torch.nn.GRUCell(HIDDEN, method["gru_hidden_dim"], bias=False)
    filled(cell, {f"weight_{name}": tensors[f"prefix_gru.weight_{name}_l0"] for name in ("ih", "hh")})
    state, rows = torch.zeros(method["gru_hidden_dim"], dtype=fed.dtype), []
    for depth, (slot, token) in enumerate(zip(slots, fed, strict=False)):
        state = cell(token, state)
        inner = torch.nn.functional.silu(tensors["embed_proj.0.weight"] @ torch.cat([slot, state]))
        rows.append(torch.cat([slot, inner if depth >= method["pure_draft_prefix_len"] else 0 * inner]))
    return torch.stack(rows)


def peagle_row(
    config: Config, tensors: Tensors, layers: torch.Tensor, x: list[int], p: int, depths: int
) -> torch.Tensor:
    """[depths, hidden]: the items that one row's last depth sees, through an ordinary causal model."""
    make: Any = LlamaConfig
    llama = make(**{key: value for key, value in config.items() if key != "rope_scaling"}, attn_implementation="eager")
    embedding, mask = tensors["embed_tokens.weight"], tensors["mask_hidden"][0, 0]
    tokens = embedding[[*x[1 : p + 2], *[config["pard_token"]] * (depths - 1)]]
    fed = torch.cat([layers[: p + 1], mask.expand(depths - 1, -1)]) @ tensors["fc.weight"].T
    rotary: Any = LlamaRotaryEmbedding(llama)
    places = rotary(tokens[None], torch.arange(p + depths)[None])
    hidden = config["hidden_size"]

    def norm(name: str, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = filled(
            LlamaRMSNorm(hidden, eps=config["rms_norm_eps"]), {"weight": tensors[f"{name}.weight"]}
        )(values)
        return found

    first: Any = LlamaDecoderLayer(llama, 0)
    for name in "qkv":
        old = getattr(first.self_attn, f"{name}_proj")
        setattr(first.self_attn, f"{name}_proj", torch.nn.Linear(2 * hidden, old.out_features, bias=False))
    own = {key: value for key, value in part(tensors, "layers.0.").items() if key != "hidden_norm.weight"}
    filled(first, own)
    h = norm("layers.0.hidden_norm", fed)
    residual = h if config.get("norm_before_residual") else fed
    joined = torch.cat([norm("layers.0.input_layernorm", tokens), h], dim=-1)
    attended = first.self_attn(joined[None], position_embeddings=places, attention_mask=causal(len(joined)))[0][0]
    h = residual + attended
    h = (h + first.mlp(first.post_attention_layernorm(h)))[None]
    for i in range(1, config["num_hidden_layers"]):
        layer: Any = filled(LlamaDecoderLayer(llama, i), part(tensors, f"layers.{i}."))
        h = layer(h, position_embeddings=places, attention_mask=causal(h.shape[1]))
    return norm("norm", h[0])[p:]


def mtp_row(
    config: Config, tensors: Tensors, last: torch.Tensor, embedding: torch.Tensor, x: list[int], s: int, depths: int
) -> torch.Tensor:
    """[depths, hidden]: one row, its chain grown by one position a depth and computed anew each time."""
    make: Any = Qwen3_5TextConfig
    part_rotated = config["partial_rotary_factor"]
    rope = {"rope_theta": config["rope_theta"], "rope_type": "default", "partial_rotary_factor": part_rotated}
    known = {key: value for key, value in config.items() if key in BASE}
    qwen = make(**known | {"layer_types": ["full_attention"], "rope_parameters": rope})
    qwen._attn_implementation = "eager"
    own = part(tensors, "mtp.layers.0.")
    layer: Any
    if config["attn_output_gate"]:
        layer = filled(Qwen3_5DecoderLayer(qwen, 0), own)
    else:  # Qwen3's layer, but for what is added to the weights of its norms
        plain: Any = Qwen3Config
        layer = QWEN3.Qwen3DecoderLayer(plain(**known, attn_implementation="eager"), 0)
        filled(layer, {name: value + ("norm" in name) for name, value in own.items()})
    rotary: Any = Qwen3_5TextRotaryEmbedding(qwen)

    def norm(name: str, values: torch.Tensor) -> torch.Tensor:
        weight = {"weight": tensors[f"mtp.{name}.weight"]}
        found: torch.Tensor = filled(Qwen3_5RMSNorm(HIDDEN, eps=config["rms_norm_eps"]), weight)(values)
        return found

    hidden = last[: s + 1]
    found = []
    for depth in range(depths):
        tokens = embedding[x[1 : s + 2 + depth]]
        joined = torch.cat([norm("pre_fc_norm_embedding", tokens), norm("pre_fc_norm_hidden", hidden)], dim=-1)
        fused = (joined @ tensors["mtp.fc.weight"].T)[None]
        places = rotary(fused, torch.arange(s + 1 + depth)[None])
        out = norm("norm", layer(fused, position_embeddings=places, attention_mask=causal(fused.shape[1]))[0, -1])
        hidden = torch.cat([hidden, out[None]])
        found.append(out)
    return torch.stack(found)
