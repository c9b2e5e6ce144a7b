"""EAGLE-3 against the trainer's own numbers: SpecForge's forward pass of the same head, at every row and depth."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from driftwatch.shadow.agreement import Agreement
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.eagle3 import replay as unroll
from driftwatch.shadow.eagle3.checkpoint import Checkpoint
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.figures import Figures, agreements
from driftwatch.shadow.packing import Packed
from driftwatch.shadow.target import Target

from .conftest import DATA

DEPTHS = 7
NEAR_TIE = 1e-3
NAMES = [one["name"] for one in json.loads((DATA / "oracle" / "manifest.json").read_text())]


@pytest.fixture(scope="module")
def oracle() -> dict[str, NDArray[Any]]:
    return dict(np.load(DATA / "oracle" / "oracle.npz"))


class Recorded:
    """What the replay computes on its way: logits of every depth, [rows alive, Vd] each, and the figures by row."""

    def __init__(self, draft: Eagle3Draft, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: list[torch.Tensor] = []
        self.figures: list[Figures] = []
        compute = draft.head.logits

        def folding(packed: Packed, figures: Figures, outside: NDArray[np.bool_]) -> list[Agreement]:
            self.figures.append(figures)
            return agreements(packed, figures, outside)

        def recording(out: torch.Tensor) -> torch.Tensor:
            self.logits.append(compute(out))
            return self.logits[-1]

        monkeypatch.setattr(draft.head, "logits", recording)
        monkeypatch.setattr(unroll, "agreements", folding)


@pytest.mark.parametrize("name", NAMES)
def test_every_row_and_depth(
    eagle3: Checkpoint,
    target: Target,
    oracle: dict[str, NDArray[Any]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """A prompt of one token makes every row a start."""
    x = oracle[f"{name}_x"].tolist()
    draft = Eagle3Draft(eagle3, target, depths=DEPTHS, agreement=True)
    recorded = Recorded(draft, monkeypatch)
    weights, agreement = draft.measure([Tokens(x[:1], x[1:])])[0]
    assert agreement is not None
    assert eagle3.to_target is not None
    assert len(recorded.logits) == DEPTHS
    (figures,) = recorded.figures
    furthest = 0.0
    compared = 0
    ties: list[tuple[int, int, float]] = []
    for depth, logits in enumerate(recorded.logits):
        rows = len(logits)
        assert rows == int(oracle[f"{name}_valid"][:, depth].sum())
        top1 = eagle3.to_target[logits.argmax(dim=-1)].numpy()
        differs = top1 != oracle[f"{name}_top1"][:rows, depth]
        ties += [(int(s), depth, float(oracle[f"{name}_top1_gap"][s, depth])) for s in np.flatnonzero(differs)]
        data = np.array(x[2 + depth : 2 + depth + rows])
        inside = oracle[f"{name}_in_draft_vocab"][:rows, depth]
        own = np.searchsorted(eagle3.to_target.numpy(), data[inside])
        logprob = logits.log_softmax(dim=-1).numpy()[np.flatnonzero(inside), own]
        np.testing.assert_allclose(logprob, oracle[f"{name}_logprob"][:rows, depth][inside], atol=1e-4)
        overlap = oracle[f"{name}_sum_min_pq"][:rows, depth]
        assert not np.isnan(overlap).any()
        np.testing.assert_allclose(figures.overlap[:rows, depth], overlap, rtol=0, atol=1e-4)
        furthest = max(furthest, float(np.abs(figures.overlap[:rows, depth] - overlap).max()))
        assert agreement.overlap[depth] == pytest.approx(figures.overlap[:, depth].sum())
        hits = oracle[f"{name}_top1"][:rows, depth] == data
        np.testing.assert_array_equal(weights.values[:rows, depth][~differs], hits[~differs])
        compared += rows
    print(f"{name}: {compared} rows and depths compared, overlap within {furthest:.1g}, near-ties {ties}")
    assert compared == sum(len(x) - 2 - depth for depth in range(DEPTHS))
    assert [one for one in ties if one[-1] >= NEAR_TIE] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_target_reads_the_same_layers(
    eagle3: Checkpoint, target: Target, oracle: dict[str, NDArray[Any]], name: str
) -> None:
    model = target.model()
    ids = torch.tensor(oracle[f"{name}_x"][None].astype(np.int64))
    with torch.inference_mode():
        ((start, found, last),) = model.prefill(ids, capture=(2, 4, 5), reduce=lambda parts: torch.cat(parts, -1))
        assert last is not None
        best = model.logits(last[0]).argmax(dim=-1).numpy()
    assert start == 0
    assert found is not None
    np.testing.assert_allclose(found[0].numpy(), oracle[f"{name}_aux"], atol=2e-4, rtol=2e-4)
    np.testing.assert_array_equal(best, oracle[f"{name}_target_argmax"])
