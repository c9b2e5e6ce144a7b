"""DFlash, Domino and P-EAGLE against the trainer's own code: SpecForge 0.2.0's forward pass of the same drafts, at
every start and depth of recorded sequences in float32, and its own decoding loop."""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from driftwatch.acceptance import accepted_per_window
from driftwatch.shadow.block.head import Kind
from driftwatch.shadow.block.replay import BlockDraft
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.target import Target

from .conftest import DATA

NEAR_TIE = 1e-3
MODELS = DATA / "models"


@pytest.fixture(scope="module")
def oracle() -> dict[str, NDArray[Any]]:
    return {key: value for name in ("dflash", "domino", "peagle") for key, value in _recorded(name).items()}


def _recorded(name: str) -> dict[str, NDArray[Any]]:
    return dict(np.load(DATA / "oracle" / f"{name}.npz"))


def logits_of(draft: BlockDraft, tokens: Tokens) -> list[torch.Tensor]:
    """Logits of every depth as the replay computes them, [rows alive, Vd] each."""
    found: list[torch.Tensor] = []
    compute = draft.logits

    def recording(out: torch.Tensor) -> torch.Tensor:
        found.append(compute(out))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft, "logits", recording)
        draft.replay([tokens])
    return found


CASES: list[tuple[Kind, str, int, int]] = [
    *(("dflash", "dflash", i, 7) for i in range(3)),
    *(("dflash", "dflash_sliding", i, 4) for i in range(3)),
    ("domino", "domino", 0, 6),
    ("domino", "domino_unshifted", 0, 5),
    *(("peagle", "peagle", i, 5) for i in range(2)),
    *(("peagle", "peagle_norm", i, 5) for i in range(2)),
]


@pytest.mark.parametrize(("kind", "name", "number", "depths"), CASES)
def test_every_start_and_depth(
    kind: Kind,
    name: str,
    number: int,
    depths: int,
    target: Target,
    oracle: dict[str, NDArray[Any]],
    tmp_path: Path,
) -> None:
    """A prompt of one token makes every position a start."""
    folder = MODELS / kind
    if name == "dflash_sliding":
        folder = MODELS / name
    elif name != kind:  # the same tensors under another flag
        shutil.copytree(folder, tmp_path / name)
        folder = tmp_path / name
        config = json.loads((folder / "config.json").read_text())
        if kind == "domino":
            config["dflash_config"]["shift_label"] = False
        else:
            config["norm_before_residual"] = True
        (folder / "config.json").write_text(json.dumps(config))
    x, top1, gap, logq = (oracle[f"{name}_{number}_{key}"] for key in ("x", "top1", "gap", "logq"))
    draft = BlockDraft.load(kind, folder, target, depths=depths)
    found = logits_of(draft, Tokens(x[:1].tolist(), x[1:].tolist()))
    assert len(found) == depths
    compared, ties = 0, []
    for depth, logits in enumerate(found):
        rows = len(logits)
        assert rows == len(x) - 2 - depth
        proposed = draft._map.target_ids(logits.argmax(dim=-1)).numpy()
        differ = proposed != top1[:rows, depth]
        assert (gap[:rows, depth][differ] < NEAR_TIE).all()
        ties += [(depth, int(row)) for row in differ.nonzero()[0]]
        served = torch.tensor(x[2 + depth : 2 + depth + rows]).long()
        own = draft._map.draft_ids(served, logits.shape[1])
        known = (own >= 0).numpy()
        assert (np.isfinite(logq[:rows, depth]) == known).all()
        mine = logits.log_softmax(dim=-1).gather(1, own.clamp(min=0)[:, None])[:, 0].numpy()
        assert np.abs(mine - logq[:rows, depth])[known].max() < 1e-4
        compared += rows
    print(f"{name} {number}: {compared} rows compared, near-ties that fell otherwise: {ties}")
    assert compared == sum(len(x) - 2 - depth for depth in range(depths))


def test_the_windows_of_its_own_decoding(target: Target, oracle: dict[str, NDArray[Any]]) -> None:
    """SpecForge's ``spec_generate`` at temperature 0: accepted counts of every window but each request's last, which
    counts what was cut too."""
    draft = BlockDraft.load("dflash", MODELS / "dflash", target, depths=7)
    requests = sum(name.endswith("_accepted") for name in oracle)
    compared: list[list[int]] = []
    for i in range(requests):
        prompt, output, accepted = (oracle[f"served_{i}_{key}"] for key in ("prompt", "output", "accepted"))
        weights = draft.replay([Tokens(prompt.tolist(), output.tolist())])[0]
        found = accepted_per_window(weights, 7)
        whole = sum(1 for end in np.cumsum(accepted + 1) if end < len(output))
        assert found[:whole] == accepted[:whole].tolist()
        compared.append(found[:whole])
    windows = list(chain.from_iterable(compared))
    print(f"{requests} requests, {len(windows)} windows, {sum(windows)} accepted")
    assert requests == 8
    assert len(windows) > 150
    assert max(windows) >= 5
