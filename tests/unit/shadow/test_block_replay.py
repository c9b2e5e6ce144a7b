"""DFlash, Domino, P-EAGLE and MTP drafts against each window computed alone, and whatever else is computed with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from driftwatch.acceptance import Weights, accepted_per_window, tally
from driftwatch.cli.replay import replay as command
from driftwatch.settings import Settings
from driftwatch.shadow.block import attention, head
from driftwatch.shadow.block import replay as module
from driftwatch.shadow.block.head import Kind
from driftwatch.shadow.block.replay import BlockDraft
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.target import Target
from driftwatch.shadow.worker import Worker
from driftwatch.store.connection import Store
from driftwatch.store.work import Task

from . import heads
from .conftest import CPU, DATA, tokens_of, trace

DEPTHS = 4
MAKE: dict[Kind, Any] = {"dflash": heads.dflash, "domino": heads.domino, "peagle": heads.peagle, "mtp": heads.mtp}


@pytest.fixture(scope="module")
def wide() -> Target:
    """The target in double precision, so that what differs is no rounding."""
    return Target(DATA / "models" / "target", device=CPU, dtype=torch.float64)


def sample(seed: int, prompt: int, output: int) -> Tokens:
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(heads.VOCABULARY, (prompt + output,), generator=draws).tolist()
    return Tokens(ids[:prompt], ids[prompt:], temperature=0.7)


@torch.inference_mode()
def proposed(draft: BlockDraft, tokens: Tokens) -> list[torch.Tensor]:
    """What the output head reads, by depth, of every window."""
    found: list[list[torch.Tensor]] = [[] for _ in range(draft.proposals)]
    propose = draft.head.propose

    def recording(*arguments: Any) -> Iterator[torch.Tensor]:
        for depth, out in enumerate(propose(*arguments)):
            found[depth].append(out)
            yield out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft.head, "propose", recording)
        draft.replay([tokens])
    return [torch.cat(parts) for parts in found if parts]


@torch.inference_mode()
def alone(kind: Kind, config: Any, tensors: Any, target: Target, tokens: Tokens) -> list[torch.Tensor]:
    """The same, each window by itself: a list of [depths, hidden]."""
    tensors = {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}
    model = target.model().model
    x = [*tokens.prompt, *tokens.output]
    done = model.model(torch.tensor([x]), output_hidden_states=True)
    ids = {"dflash": "dflash_config", "domino": "dflash_config", "peagle": "eagle_config", "mtp": None}[kind]
    if ids is None:
        last = done.last_hidden_state[0]
    else:
        named = next(value for key, value in config[ids].items() if "layer_ids" in key)
        layers = torch.cat([done.hidden_states[i + 1][0] for i in named], dim=-1)
    found = []
    for a in range(len(tokens.prompt), len(x) - 1):
        table = model.model.embed_tokens.weight
        if kind in ("dflash", "domino"):
            slots = heads.dflash_block(config, tensors, layers, table, x, a)
            found.append(slots[1:] if kind == "dflash" else heads.domino_block(config, tensors, slots, table[x[a:]]))
        elif kind == "peagle":
            found.append(heads.peagle_row(config, tensors, layers, x, a - 1, DEPTHS))
        else:
            depths = min(DEPTHS, len(x) - 1 - a)
            found.append(heads.mtp_row(config, tensors, last, table, x, a - 1, depths))
    return found


def check(kind: Kind, config: Any, tensors: Any, target: Target, tokens: Tokens, folder: Path) -> int:
    draft = BlockDraft.load(kind, heads.written(folder, config, tensors), target, depths=DEPTHS)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # for the modules that the reference is made of
    try:
        wanted = alone(kind, config, tensors, target, tokens)
    finally:
        torch.set_default_dtype(default)
    found = proposed(draft, tokens)
    compared = 0
    for row, window in enumerate(wanted):
        for depth in range(min(len(window), len(found), len(wanted) - row)):
            torch.testing.assert_close(found[depth][row], window[depth].to(found[depth].dtype), rtol=2e-4, atol=2e-4)
            compared += 1
    return compared


CASES: list[tuple[Kind, dict[str, Any]]] = [
    ("dflash", {}),
    ("dflash", {"num_key_value_heads": 4, "num_hidden_layers": 1, "block_size": 2}),
    ("dflash", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}),
    ("dflash", {"dflash_config": {"mask_token_id": 2047, "target_layer_ids": [6]}, "rope_theta": 1e6}),
    ("domino", {}),
    ("domino", {"method": {"shift_label": False, "pure_draft_prefix_len": 0}, "block_size": 6}),
    ("domino", {"method": {"pure_draft_prefix_len": 3}, "layer_types": ["sliding_attention"] * 2, "sliding_window": 4}),
    ("peagle", {}),
    ("peagle", {"norm_before_residual": True, "num_hidden_layers": 3}),
    ("peagle", {"num_hidden_layers": 1, "hidden_size": 64, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("mtp", {}),
    ("mtp", {"attn_output_gate": False, "partial_rotary_factor": 1.0}),
    ("mtp", {"partial_rotary_factor": 0.5, "num_key_value_heads": 1, "rope_theta": 500.0}),
]


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_each_window_is_as_it_is_alone(kind: Kind, changes: dict[str, Any], wide: Target, tmp_path: Path) -> None:
    config, tensors = MAKE[kind](1, **changes)
    compared = check(kind, config, tensors, wide, sample(2, 5, 13), tmp_path)
    shifted = kind == "domino" and config["dflash_config"]["shift_label"]
    depths = min(DEPTHS, config.get("block_size", 99) - (not shifted))
    assert compared == sum(12 - depth for depth in range(depths))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["full_attention", "sliding_attention"]),
    st.integers(2, 7),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(2, 9),
)
def test_any_block_and_window(
    wide: Target, tmp_path: Path, layer: str, block: int, window: int, prompt: int, output: int
) -> None:
    changes = {"layer_types": [layer, "sliding_attention"], "sliding_window": window, "block_size": block}
    config, tensors = heads.dflash(3, **changes)
    assert check("dflash", config, tensors, wide, sample(block, prompt, output), tmp_path / f"{block}") > 0


def flat(draft: BlockDraft, batch: list[Tokens]) -> list[NDArray[np.float64]]:
    """All that a replay gives of each sample, as numbers."""
    rows = []
    for weights, agreement in draft.measure(batch):
        assert agreement is not None
        rows.append(np.concatenate([weights.values.ravel(), agreement.p_top1, agreement.overlap, agreement.match]))
    return rows


@pytest.mark.parametrize("rule", ["argmax", "rejection"])
@pytest.mark.parametrize("kind", list(MAKE))
def test_a_sample_does_not_depend_on_its_batch_or_its_pieces(
    kind: Kind, rule: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = MAKE[kind](4)
    folder = heads.written(tmp_path, config, tensors)

    def load(prefill: int) -> BlockDraft:
        target = Target(DATA / "models" / "target", device=CPU, dtype=torch.float64, prefill_tokens=prefill)
        return BlockDraft.load(kind, folder, target, depths=DEPTHS, rule=rule, agreement=True)

    samples = [sample(seed, 3 + 7 * seed, 4 + 9 * seed) for seed in range(4)]
    together = flat(load(16_384), samples)
    for one, found in zip(samples, together, strict=True):
        np.testing.assert_allclose(flat(load(16_384), [one])[0], found, rtol=1e-6, atol=1e-6)
    monkeypatch.setattr(module, "SLOTS", 3 * (DEPTHS + 1))
    monkeypatch.setattr(attention, "SCORE_ELEMENTS", 300)
    monkeypatch.setattr(head, "PIECE", 7)
    for pieces, found in zip(flat(load(40), samples), together, strict=True):
        np.testing.assert_allclose(pieces, found, rtol=1e-6, atol=1e-6)


@torch.inference_mode()
def test_the_rejection_rule_compares_with_the_target(wide: Target, tmp_path: Path) -> None:
    config, tensors = heads.dflash(5)
    folder = heads.written(tmp_path, config, tensors)
    tokens = sample(6, 4, 8)
    draft = BlockDraft.load("dflash", folder, wide, depths=DEPTHS, rule="rejection")
    weights = draft.replay([tokens])[0].values
    model = wide.model().model
    x = [*tokens.prompt, *tokens.output]
    p = (model(torch.tensor([x])).logits[0] / 0.7).softmax(-1)
    read = BlockDraft.load("dflash", folder, wide, depths=DEPTHS)
    for depth, out in enumerate(proposed(read, tokens)):
        q = (model.lm_head(out) / 0.7).softmax(-1)
        for row in range(7 - depth):
            at = 5 + row + depth
            expected = min(1.0, float(q[row, x[at]] / p[at - 1, x[at]]))
            assert weights[row, depth] == pytest.approx(expected, rel=1e-4)


def test_a_block_that_is_shorter_than_gamma_runs_out(target: Target, tmp_path: Path) -> None:
    config, tensors = heads.dflash(7, block_size=3)
    draft = BlockDraft.load("dflash", heads.written(tmp_path, config, tensors), target, depths=5)
    weights = draft.replay([sample(8, 4, 20)])[0]
    assert weights.values.shape == (19, 5)
    assert weights.proposals is not None
    assert set(weights.proposals) == {2}
    counts = tally(weights, 5)
    assert counts.drafted[4] == counts.drafted[1] == 2 * counts.windows[1]


def test_a_qwen35_target(tmp_path: Path) -> None:
    """The family that has such heads: gated delta layers among full ones, its own partly rotated attention."""
    make: Any = Qwen3_5TextConfig
    config = make(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    torch.manual_seed(0)
    loader: Any = AutoModelForCausalLM
    target = Target.of(loader.from_config(config, dtype=torch.float32).eval())
    sizes = {"hidden_size": 32, "vocab_size": 64, "num_key_value_heads": 2}
    own, tensors = heads.mtp(9, **sizes)
    tensors = {
        name: value[tuple(slice(0, size // 4 if size in (128, 256) else size) for size in value.shape)]
        for name, value in tensors.items()
        if not name.startswith("mtp.layers.0.")
    }
    tensors |= heads.random(heads.layer_shapes("mtp.layers.0.", own, 32, qk_norm=True, gated=True), 9, around=0.0)
    draft = BlockDraft.load("mtp", heads.written(tmp_path, own, tensors), target, depths=3)
    weights = draft.replay([Tokens([1, 2, 3], list(range(10, 24)))])[0]
    assert weights.values.shape == (13, 3)
    assert draft.fingerprint.vocabulary == 64


@pytest.mark.parametrize("kind", ["dflash", "mtp"])
def test_worker(kind: Kind, sqlite_store: Store, target: Target, tmp_path: Path) -> None:
    """What is stored is what the draft gives, and decodes to it."""
    folder = heads.written(tmp_path / "draft", *MAKE[kind](11))
    model = {"name": "*", "target": str(target.path), "drafts": [{"name": "incumbent", "path": str(folder)}]}
    worker = Worker(Settings(models=[model], shadow={"device": "cpu", "threads": 1}), sqlite_store)
    tokens = tokens_of(trace("eagle3.T0")[0])
    task = Task(
        work_id=1,
        sample_id=1,
        draft="incumbent",
        model="m",
        segment="all",
        prompt_ids=list(tokens.prompt),
        output_ids=list(tokens.output),
        text=None,
        temperature=0.0,
        top_p=None,
        top_k=None,
    )
    (verdict,) = worker.judge([task])
    row = verdict.replay
    assert row is not None
    expected = BlockDraft.load(kind, folder, target, depths=8).replay([tokens])[0]
    stored = Weights.decode(
        row["encoding"], row["weights"], tokens=row["tokens"], depths=row["depths"], proposals=row["proposals"]
    )
    np.testing.assert_array_equal(stored.values, expected.values)
    assert row["depths"] == 8
    assert (stored.proposals is None) == (kind == "mtp")
    assert accepted_per_window(stored, 3) == accepted_per_window(expected, 3)


def test_replay_command(tmp_path: Path) -> None:
    config, tensors = heads.peagle(10)
    folder = heads.written(tmp_path / "draft", config, tensors)
    file = tmp_path / "some.jsonl"
    file.write_text("".join(one.model_dump_json(exclude_none=True) + "\n" for one in trace("eagle3.T0")[:3]))
    options = ["--draft", str(folder), "--target", str(DATA / "models" / "target"), "--gamma", "3", "--json"]
    done = CliRunner().invoke(command, [str(file), *options])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert report["draft"]["kind"] == "peagle"
    assert report["requests"] == 3
    assert set(report["gamma"]) == {"1", "2", "3"}
    assert report["agreement"]["tokens"] == 3 * 63
