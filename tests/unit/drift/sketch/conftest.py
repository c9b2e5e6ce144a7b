"""Real prompts: code, which the demo's draft was trained on, and general chat, which it was not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from driftwatch.drift.sketch.build import Row
from driftwatch.drift.sketch.grams import Ids

ROOT = Path(__file__).parents[4]


@dataclass(frozen=True)
class Prompts:
    """SmolLM2's token ids by kind and half, and the part of its input embedding that the demo's draft kept."""

    ids: dict[str, list[Ids]]
    embedding: NDArray[np.float32]

    def rows(self, name: str) -> list[Row]:
        return rows(self.ids[name])


def rows(prompts: list[Ids]) -> list[Row]:
    return [Row(ids, ids) for ids in prompts]


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    stored = np.load(ROOT / "tests" / "data" / "prompts" / "smollm2.npz")
    names = ("code_train", "code_traffic", "chat_train", "chat_traffic")
    ids = {
        name: np.split(stored[name].astype(np.int64), np.cumsum(stored[f"{name}_lengths"].astype(np.int64))[:-1])
        for name in names
    }
    return Prompts(ids, _embedding())


def _embedding() -> NDArray[np.float32]:
    from safetensors import safe_open

    with safe_open(ROOT / "driftwatch" / "demo" / "draft" / "model.safetensors", "pt") as file:
        kept = file.get_tensor("model.embed_tokens.weight").float().numpy()
        offsets = file.get_tensor("d2t").numpy()
    whole = np.zeros((49_152, 64), np.float32)
    whole[np.arange(len(kept)) + offsets] = kept[:, :64]
    return whole
