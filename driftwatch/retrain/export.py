"""Training data for a cell: the served tokens, as pre-tokenised JSONL that SpecForge reads.

One row a request, ``{"input_ids", "loss_mask"}``, the mask 1 on the target's output tokens alone (SpecForge 0.2.0,
``data.prompts_path``).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import Select, select

from driftwatch.errors import StoreError
from driftwatch.store.connection import Store
from driftwatch.store.samples import unpack_ids
from driftwatch.store.schema import Cell, Payload, Replay, Sample

TRAIN = "train.jsonl"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Export:
    """What was written, as it goes into the request to retrain."""

    format: str
    uri: str
    sha256: str
    rows: int
    loss_tokens: int
    since: float


def export(store: Store, cell_id: int, *, since: float, folder: Path) -> Export:
    """Write the cell's served tokens from ``since`` on into ``folder``, whole or not at all.

    A folder that is already there, from a run that died before it was recorded, is written anew. Raises StoreError if
    the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            done = _write(store, cell_id, since, folder, scratch)
            shutil.rmtree(folder, ignore_errors=True)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise StoreError(f"`retrain.export_dir`: {folder}: {error.strerror or error}") from error
    return done


def _write(store: Store, cell_id: int, since: float, folder: Path, scratch: Path) -> Export:
    digest = hashlib.sha256()
    rows = loss_tokens = 0
    with (scratch / TRAIN).open("wb") as file:
        for prompt, output in _tokens(store, cell_id, since):
            row = {"input_ids": prompt + output, "loss_mask": [0] * len(prompt) + [1] * len(output)}
            line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
            file.write(line)
            digest.update(line)
            rows += 1
            loss_tokens += len(output)
    uri = (folder / TRAIN).absolute().as_uri()
    done = Export("pretokenised-jsonl", uri, digest.hexdigest(), rows, loss_tokens, since)
    (scratch / MANIFEST).write_text(json.dumps(asdict(done), indent=2) + "\n")
    return done


def _tokens(store: Store, cell_id: int, since: float) -> Iterator[tuple[list[int], list[int]]]:
    with store.read() as session:
        cell = session.get_one(Cell, cell_id)
        for payload in session.scalars(_payloads(cell, since)).yield_per(500):
            yield unpack_ids(payload.prompt_ids or b""), unpack_ids(payload.output_ids or b"")


def _payloads(cell: Cell, since: float) -> Select[Payload]:
    """Of the requests that the cell was made of: those replayed, or those whose figures came from the engine."""
    served = (
        select(Payload)
        .join(Sample, Sample.id == Payload.sample_id)
        .where(
            Sample.deployment_id == cell.deployment_id,
            Sample.segment == cell.segment,
            Sample.served_at >= since,
            Payload.prompt_ids.is_not(None),
        )
        .order_by(Sample.id)
    )
    if cell.channel == "live":
        return served.where(Sample.live_folded_at.is_not(None))
    return served.join(Replay, Replay.sample_id == Sample.id).where(
        Replay.draft == cell.draft, Replay.split == cell.split
    )
