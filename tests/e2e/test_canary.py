"""Canaries against a real engine: transformers' own server keeps its answers, and other weights change them."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from driftwatch.control import canary
from driftwatch.demo.engine import engine_command, free_ports, running
from driftwatch.records import Record
from driftwatch.settings import Settings
from driftwatch.store import canaries, samples
from driftwatch.store.connection import Store

TARGET = Path(__file__).parents[1] / "data" / "models" / "target"
PROMPTS = [f"def function_{i}(x):\n    return" for i in range(10)]


def rounds(store: Store, settings: Settings, folder: Path, count: int) -> int:
    """Start the engine on what the folder holds, ask it some rounds, and stop it."""
    port = int(settings.engine.url.rpartition(":")[2])
    command = engine_command(Path(folder.name), port)
    health = [f"{settings.engine.url}/health"]
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    log = folder.parent / "engine.log"
    with (
        running("the engine", command, log=log, ready=health, cwd=folder.parent, **quiet),
        httpx.Client(trust_env=False) as client,
    ):
        return sum(canary.run(store, settings, PROMPTS, client, time.time()) for _ in range(count))


@pytest.mark.timeout(600)
def test_other_weights_under_the_same_name_answer_otherwise(sqlite_store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TARGET, folder)
    (port,) = free_ports(1)
    settings = Settings(engine={"url": f"http://127.0.0.1:{port}"})
    ids = {"prompt_token_ids": [1], "output_token_ids": [2, 3]}
    with sqlite_store.write() as session:
        record = Record(id="a", model=folder.name, **ids)  # type: ignore[arg-type]
        samples.add(session, [(record, ())], now=time.time(), max_segments=10)
    assert rounds(sqlite_store, settings, folder, canary.REFERENCE_RUNS + 2) == canary.REFERENCE_RUNS + 2
    with sqlite_store.read() as session:
        assert canaries.changed(session, 1) is False
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        if "mlp" in name:
            spread = 0.5 * float(tensor.float().std())
            weights[name] = tensor + (spread * torch.randn(tensor.shape, generator=noise)).to(tensor.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert rounds(sqlite_store, settings, folder, 2) == 2
    with sqlite_store.read() as session:
        assert canaries.changed(session, 1) is True
