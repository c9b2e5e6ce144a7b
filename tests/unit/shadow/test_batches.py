"""A sample's result does not depend on what else is in its batch, on padding, or on the pieces it is read in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from driftwatch.acceptance import Rule
from driftwatch.shadow.causal import MASK_ELEMENTS, Causal
from driftwatch.shadow.chain import ChainDraft
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.eagle3 import head
from driftwatch.shadow.eagle3 import replay as unroll
from driftwatch.shadow.eagle3.checkpoint import Checkpoint
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.replay import replay
from driftwatch.shadow.target import Target

from .conftest import CPU, DATA, tokens_of, trace
from .test_eagle3_chain import random_head, random_spec, random_target

TOLERANCE = 2e-5
"""Of weights under the rejection rule, in float32: sums in another order."""


def samples() -> list[Tokens]:
    """Requests of very different lengths, some with one judged token."""
    found = [tokens_of(record) for record in trace("eagle3.T0.8")[::3]]
    return [dataclasses.replace(one, output=one.output[: 2 + 9 * (i % 8)]) for i, one in enumerate(found)]


def draft_of(kind: str, rule: Rule, eagle3: Checkpoint, target: Target) -> Any:
    if kind == "eagle3":
        return Eagle3Draft(eagle3, target, depths=8, rule=rule, agreement=True)
    return ChainDraft.load(
        DATA / "models" / "chain", device=CPU, dtype=torch.float32, target=target, rule=rule, agreement=True
    )


def differences(found: Sequence[Any], expected: Sequence[Any]) -> tuple[float, float]:
    """Largest difference of weights and of agreement sums."""
    weights = max(np.abs(a.values - b.values).max() for (a, _), (b, _) in zip(found, expected, strict=True))
    sums = max(np.abs(a.overlap - b.overlap).max() for (_, a), (_, b) in zip(found, expected, strict=True))
    return float(weights), float(sums)


@pytest.mark.parametrize("kind", ["eagle3", "chain"])
@pytest.mark.parametrize("rule", ["argmax", "rejection"])
def test_companions_and_padding(kind: str, rule: Rule, eagle3: Checkpoint, target: Target) -> None:
    draft = draft_of(kind, rule, eagle3, target)
    whole = samples()
    alone = [draft.measure([one])[0] for one in whole]
    for batch_tokens in (200, 1000, 100_000):
        results = {result.index: result for result in replay(draft, whole, batch_tokens=batch_tokens)}
        found = [(results[i].weights, results[i].agreement) for i in range(len(whole))]
        weights, sums = differences(found, alone)
        assert weights <= (0 if rule == "argmax" else TOLERANCE)
        assert sums < 1e-3


@pytest.mark.parametrize("kind", ["eagle3", "chain"])
@pytest.mark.parametrize("rule", ["argmax", "rejection"])
def test_pieces_of_a_long_sample(
    kind: str, rule: Rule, eagle3: Checkpoint, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models read through a cache in pieces of a few tokens; rows, scores and keys in blocks as small."""
    draft = draft_of(kind, rule, eagle3, target)
    whole = samples()[:8]
    expected = draft.measure(whole)
    models: list[Causal] = [target.model()] if kind == "eagle3" else [target.model(), draft._model]
    for model in models:
        monkeypatch.setattr(model, "prefill_tokens", 13)
    monkeypatch.setattr("driftwatch.shadow.judge.LOGIT_ELEMENTS", 2048 * 17)
    monkeypatch.setattr(unroll, "CONTEXT_ROWS", 11)
    monkeypatch.setattr(head, "SCORE_ELEMENTS", 4 * 300)
    in_batch = draft.measure(whole)
    one_by_one = [draft.measure([one])[0] for one in whole]
    for found in (in_batch, one_by_one):
        weights, sums = differences(found, expected)
        assert weights <= (0 if rule == "argmax" else TOLERANCE)
        assert sums < 1e-3


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Elements of the largest tensor that any operation made."""

    elements = 0
    shape: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and leaf.numel() > self.elements:
                self.elements, self.shape = leaf.numel(), tuple(leaf.shape)
        return found


def test_no_tensor_of_positions_by_depths_by_vocabulary(eagle3: Checkpoint) -> None:
    """Of a sample of 4,000 tokens with 2,000 judged, the largest tensor is bounded by the settings, not by the sample:
    here by a piece of the prefill. Positions x depths x vocabulary would be 16 million elements."""
    target = Target(DATA / "models" / "target", device=CPU, dtype=torch.float32, prefill_tokens=512)
    draft = Eagle3Draft(eagle3, target, depths=8)
    rng = np.random.default_rng(0)
    sample = Tokens(rng.integers(0, 2048, 2000).tolist(), rng.integers(0, 2048, 2001).tolist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("driftwatch.shadow.judge.LOGIT_ELEMENTS", 1 << 18)
        patch.setattr(head, "SCORE_ELEMENTS", 1 << 19)
        with Largest() as largest:  # type: ignore[no-untyped-call]
            draft.replay([sample])
    print(f"largest tensor: {largest.elements:,} elements {largest.shape}")
    assert largest.elements <= 512 * 4000  # the attention mask of one piece over the cache


def test_a_long_sample_in_pieces() -> None:
    """16,000 tokens through a small random model: pieces get smaller as the context grows, no judged row is lost."""
    target = random_target(0, layers=2, vocabulary=64)
    model = target.model()
    assert model._piece(8, 2000) == 2000
    assert model._piece(1, 32_000) < model._piece(1, 20_000) <= model.prefill_tokens
    assert model._piece(1, 131_072) == MASK_ELEMENTS // 131_072
    spec = random_spec(aux=(0, 1, 1), vocabulary=20, target_vocabulary=64)
    draft = Eagle3Draft(random_head(0, spec), target, depths=3)
    model.prefill_tokens = 4096
    rng = np.random.default_rng(0)
    (weights,) = draft.replay([Tokens(rng.integers(0, 64, 15_900).tolist(), rng.integers(0, 64, 101).tolist())])
    assert weights.values.shape == (100, 3)
    assert 0 < weights.values.mean() < 0.5


def test_layers_behind_the_last_one_read_do_not_run(eagle3: Checkpoint, target: Target) -> None:
    """Without logits the target stops after the highest layer that the head reads, and is whole again afterwards."""
    ran: list[int] = []
    layers = target.model().backbone.layers
    hooks = [layer.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, layer in enumerate(layers)]
    sample = tokens_of(trace("eagle3.T0")[0])
    try:
        Eagle3Draft(eagle3, target, depths=2).replay([sample])
        assert ran == [0, 1, 2, 3, 4]
        ran.clear()
        Eagle3Draft(eagle3, target, depths=2, agreement=True).replay([sample])
        assert ran == list(range(8))
    finally:
        for hook in hooks:
            hook.remove()
