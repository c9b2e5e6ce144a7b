"""Models and records that several of the shadow's tests read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from driftwatch.records import Record, read_records
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.eagle3.checkpoint import Checkpoint, read_checkpoint
from driftwatch.shadow.target import Target

DATA = Path(__file__).parents[2] / "data"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target() -> Target:
    return Target(DATA / "models" / "target", device=CPU, dtype=torch.float32)


@pytest.fixture(scope="session")
def eagle3() -> Checkpoint:
    return read_checkpoint(DATA / "models" / "eagle3")


def trace(name: str) -> list[Record]:
    return list(read_records([DATA / "traces" / f"{name}.jsonl"]))


def tokens_of(record: Record) -> Tokens:
    assert record.prompt_token_ids is not None
    assert record.output_token_ids is not None
    return Tokens(record.prompt_token_ids, record.output_token_ids, record.temperature, record.top_p, record.top_k)
