"""EAGLE-3's parallel unroll against an explicit chain: one window at a time, token by token, with a cache of keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from driftwatch.acceptance import accepted_per_window
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.eagle3.checkpoint import Checkpoint
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.eagle3.spec import Eagle3Spec, Rope
from driftwatch.shadow.target import Target

VOCABULARY = 40
WIDTH = 16


def random_target(seed: int, *, layers: int = 4, vocabulary: int = VOCABULARY, width: int = WIDTH) -> Target:
    torch.manual_seed(seed)
    make: Any = LlamaConfig
    config = make(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
    build: Any = LlamaForCausalLM
    return Target.of(build(config).to(torch.float64).eval())


def random_head(seed: int, spec: Eagle3Spec) -> Checkpoint:
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return 0.4 * torch.randn(*shape, generator=rng, dtype=torch.float64)

    h, q, kv, inner = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, 24
    tensors = {
        "fc.weight": normal(h, spec.aux_count * spec.target_hidden),
        "self_attn.q_proj.weight": normal(q, 2 * h),
        "self_attn.k_proj.weight": normal(kv, 2 * h),
        "self_attn.v_proj.weight": normal(kv, 2 * h),
        "self_attn.o_proj.weight": normal(h, q),
        "mlp.gate_proj.weight": normal(inner, h),
        "mlp.up_proj.weight": normal(inner, h),
        "mlp.down_proj.weight": normal(h, inner),
        "lm_head.weight": 3 * normal(spec.vocabulary, h),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": 1 + normal(h) for name in norms}
    if spec.fc_norm:
        tensors |= {f"fc_norm.{i}.weight": 1 + normal(spec.target_hidden) for i in range(spec.aux_count)}
    if spec.norm_before_fc:
        tensors["input_norm.weight"] = 1 + normal(spec.aux_count * spec.target_hidden)
    if spec.qk_norm:
        tensors |= {f"self_attn.{name}_norm.weight": 1 + normal(spec.head_dim) for name in "qk"}
    if spec.embedding == "own":
        tensors["embed_tokens.weight"] = normal(spec.target_vocabulary, h)
    members = torch.randperm(spec.target_vocabulary, generator=rng)[: spec.vocabulary].sort().values
    return Checkpoint(Path("random"), spec, tensors, members, "0")


class ExplicitChain:
    """The head as an engine runs it: prefill over what is served, then one token a step. Written plainly in float64."""

    def __init__(self, spec: Eagle3Spec, t: Mapping[str, torch.Tensor], embedding: torch.Tensor) -> None:
        self.spec, self.t, self.embedding = spec, t, embedding
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.t[f"{name}.weight"] * x / torch.sqrt((x * x).mean() + self.spec.eps)

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        size = self.spec.head_dim
        angle = position / self.spec.rope.theta ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def first(self, layers: list[torch.Tensor]) -> torch.Tensor:
        if self.spec.fc_norm:
            layers = [self.rms(layer, f"fc_norm.{i}") for i, layer in enumerate(layers)]
        joined = torch.cat(layers)
        if self.spec.norm_before_fc:
            joined = self.rms(joined, "input_norm")
        return self.t["fc.weight"] @ joined

    def step(self, token: int, hidden: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and the hidden state fed next."""
        spec, t = self.spec, self.t
        fed = torch.cat([self.rms(self.embedding[token], "input_layernorm"), self.rms(hidden, "hidden_norm")])
        query = (t["self_attn.q_proj.weight"] @ fed).view(spec.heads, -1)
        key = (t["self_attn.k_proj.weight"] @ fed).view(spec.kv_heads, -1)
        if spec.qk_norm:
            query = torch.stack([self.rms(one, "self_attn.q_norm") for one in query])
            key = torch.stack([self.rms(one, "self_attn.k_norm") for one in key])
        self.keys.append(self.rotate(key, position))
        self.values.append((t["self_attn.v_proj.weight"] @ fed).view(spec.kv_heads, -1))
        query = self.rotate(query, position)
        mixed = []
        for head in range(spec.heads):
            own = head // (spec.heads // spec.kv_heads)
            scores = torch.stack([query[head] @ key[own] for key in self.keys]) / spec.head_dim**0.5
            shares = scores.softmax(0)
            mixed.append(sum(share * value[own] for share, value in zip(shares, self.values, strict=True)))
        residual = self.rms(hidden, "hidden_norm") if spec.norm_before_residual else hidden
        out = residual + t["self_attn.o_proj.weight"] @ torch.cat(mixed)
        inner = self.rms(out, "post_attention_layernorm")
        gate = torch.nn.functional.silu(t["mlp.gate_proj.weight"] @ inner)
        out = out + t["mlp.down_proj.weight"] @ (gate * (t["mlp.up_proj.weight"] @ inner))
        normed = self.rms(out, "norm")
        logits = t["lm_head.weight"] @ (normed if spec.last_norm else out)
        return logits, normed if spec.norm_output else out


def fed(
    checkpoint: Checkpoint, target: Target, known: Sequence[int]
) -> tuple[ExplicitChain, torch.Tensor, torch.Tensor]:
    """The head after the tokens known so far, and what it says of the next: logits and its own output."""
    spec, model = checkpoint.spec, target.model()
    with torch.inference_mode():
        found = model.model(torch.tensor([known]), output_hidden_states=True).hidden_states
    chain = ExplicitChain(spec, checkpoint.tensors, checkpoint.tensors.get("embed_tokens.weight", model.embedding))
    for s in range(len(known) - 1):
        layers = [found[i][0, s] for i in spec.layers(model.layers)]
        logits, hidden = chain.step(known[s + 1], chain.first(layers), s + spec.first_position)
    return chain, logits, hidden


def propose(checkpoint: Checkpoint, target: Target, known: Sequence[int], gamma: int) -> list[int]:
    """What the head proposes after the tokens known so far, each proposal fed to make the next."""
    assert checkpoint.to_target is not None
    chain, logits, hidden = fed(checkpoint, target, known)
    proposals = [int(checkpoint.to_target[int(logits.argmax())])]
    for depth in range(1, gamma):
        logits, hidden = chain.step(proposals[-1], hidden, len(known) - 2 + depth + checkpoint.spec.first_position)
        proposals.append(int(checkpoint.to_target[int(logits.argmax())]))
    return proposals


def engine_walk(checkpoint: Checkpoint, target: Target, sample: Tokens, gamma: int) -> list[int]:
    """Speculative decoding as an engine does it, on tokens that are known: propose, count matches, advance."""
    x = [*sample.prompt, *sample.output]
    counts, known = [], len(sample.prompt) + 1
    while known < len(x):
        proposals = propose(checkpoint, target, x[:known], gamma)
        accepted = 0
        while accepted < gamma and known + accepted < len(x) and proposals[accepted] == x[known + accepted]:
            accepted += 1
        counts.append(accepted)
        known += accepted + 1
    return counts


def likely_output(checkpoint: Checkpoint, target: Target, seed: int, prompt: int, outputs: int) -> Tokens:
    """An output that takes some of the head's own proposals at each window, so that deep windows occur."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, VOCABULARY, prompt + 1).tolist()
    while len(x) < prompt + outputs:
        taken = int(rng.integers(0, 5))
        x += [*propose(checkpoint, target, x, 4)[:taken], int(rng.integers(0, VOCABULARY))]
    return Tokens(x[:prompt], x[prompt : prompt + outputs])


def random_spec(**values: Any) -> Eagle3Spec:
    plain = Eagle3Spec(
        origin="speculators",
        hidden=WIDTH,
        target_hidden=WIDTH,
        heads=4,
        kv_heads=2,
        head_dim=6,
        vocabulary=12,
        target_vocabulary=VOCABULARY,
        eps=1e-6,
        activation="silu",
        rope=Rope(100.0),
        aux=(1, 2, 3),
    )
    return dataclasses.replace(plain, **values)


flags = st.fixed_dictionaries(
    {name: st.booleans() for name in ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "qk_norm")}
)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    flags=flags,
    last_norm=st.booleans(),
    own=st.booleans(),
    position=st.integers(0, 1),
    gamma=st.integers(1, 8),
    prompt=st.integers(1, 6),
    outputs=st.integers(2, 12),
)
def test_windows_of_an_explicit_chain(
    seed: int, flags: dict[str, bool], last_norm: bool, own: bool, position: int, gamma: int, prompt: int, outputs: int
) -> None:
    target = random_target(seed)
    embedding: Any = "own" if own else "target"
    spec = random_spec(**flags, last_norm=last_norm, embedding=embedding, first_position=position)
    checkpoint = random_head(seed, spec)
    draft = Eagle3Draft(checkpoint, target, depths=gamma)
    sample = likely_output(checkpoint, target, seed, prompt, outputs)
    weights = draft.replay([sample])[0]
    assert accepted_per_window(weights, gamma) == engine_walk(checkpoint, target, sample, gamma)


def test_the_compared_windows_are_deep_enough() -> None:
    """The same over fixed seeds, with the share of windows that reached each depth."""
    gamma, compared = 4, []
    for seed in range(12):
        target, checkpoint = random_target(seed), random_head(seed, random_spec())
        sample = likely_output(checkpoint, target, seed, 3, 30)
        walked = engine_walk(checkpoint, target, sample, gamma)
        assert accepted_per_window(Eagle3Draft(checkpoint, target, depths=gamma).replay([sample])[0], gamma) == walked
        compared += walked
    print(f"{len(compared)} windows compared, by accepted proposals: {np.bincount(compared, minlength=gamma + 1)}")
    assert (np.bincount(compared, minlength=gamma + 1) > 0).all()
