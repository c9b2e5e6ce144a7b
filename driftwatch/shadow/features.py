"""Offline features in SpecForge's layout: what the target computes over training rows, written once and read often.

A trainer that reads them runs neither the target nor a server of it. The layout is that of SpecForge 0.2.0
(``runtime/data_plane/offline_reader.py``): ``rows_{g}-{g + 2000}/data_{i}.ckpt``, each one row by ``torch.save``, with
``input_ids`` and ``loss_mask`` [S] and

* for EAGLE-3 (``algorithms/eagle3/data.py``) ``aux_hidden_state`` [1, S, 3 H], the layers that the draft reads side by
  side, and ``hidden_state`` [1, S, H], the last states after the final norm, from which the trainer takes logits;
* for DFlash and Domino (``algorithms/common/dflash_family_data.py``) ``hidden_states`` [1, S, n H], their n layers.
"""

from __future__ import annotations

import hashlib
import io
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch

from driftwatch.errors import ModelError, RecordError
from driftwatch.records import read_lines
from driftwatch.shadow.block.replay import BlockDraft
from driftwatch.shadow.causal import Causal
from driftwatch.shadow.device import is_out_of_memory
from driftwatch.shadow.draft import Draft
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.target import Target

FORMAT = "specforge-offline"
GROUP = 2000
"""Rows of one folder."""
KINDS = ("eagle3", "dflash", "domino")
"""What SpecForge 0.2.0 trains from files."""


@dataclass(frozen=True)
class Row:
    """One row of training data; ``mask`` is 1 on what the target said."""

    ids: Sequence[int]
    mask: Sequence[int]

    @property
    def trains(self) -> bool:
        """Whether two tokens that follow each other are to be learnt: with fewer SpecForge refuses the row."""
        return any(a and b for a, b in zip(self.mask, self.mask[1:], strict=False))


@dataclass(frozen=True)
class Reading:
    """The target, and what of it a draft is trained on."""

    kind: str
    target: Causal
    layers: tuple[int, ...]
    """Indices into Hugging Face's ``hidden_states``."""

    @classmethod
    def of(cls, draft: Draft, target: Target) -> Reading:
        """Raises ModelError for a draft that is trained in another way, or a target that cannot be loaded here."""
        kind = draft.fingerprint.kind
        if kind not in KINDS or not isinstance(draft, Eagle3Draft | BlockDraft) or draft.layers is None:
            raise ModelError(
                f"draft {draft.fingerprint.path}: no features for a draft of kind {kind}; SpecForge 0.2.0 reads those "
                f"of {', '.join(KINDS)}"
            )
        return cls(kind, target.model(), tuple(draft.layers))

    def bytes_of(self, row: Row) -> int:
        """On disk, but for some hundred bytes a file."""
        states = len(self.layers) + (self.kind == "eagle3")
        return len(row.ids) * (16 + states * self.target.hidden * self.target.dtype.itemsize)

    @torch.inference_mode()
    def features(self, row: Row) -> dict[str, torch.Tensor]:
        """One file's contents, on the CPU."""
        ids = torch.tensor(row.ids, dtype=torch.long)
        layers, last = [], []
        eagle = self.kind == "eagle3"
        passes = self.target.prefill(
            ids[None].to(self.target.device), capture=self.layers, reduce=_side_by_side, final=eagle
        )
        for _, kept, final in passes:
            assert kept is not None
            layers.append(kept)
            if final is not None:
                last.append(final.cpu())
        both = {"input_ids": ids, "loss_mask": torch.tensor(row.mask, dtype=torch.long)}
        aux = torch.cat(layers, dim=1)
        if not eagle:
            return both | {"hidden_states": aux}
        return both | {"hidden_state": torch.cat(last, dim=1), "aux_hidden_state": aux}


def _side_by_side(layers: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([layer.cpu() for layer in layers], dim=-1)


def write(path: Path, folder: Path, reading: Reading, *, max_length: int) -> dict[str, Any]:
    """Write the features of pre-tokenised rows (``{"input_ids", "loss_mask"}``, JSONL) into a folder; rows are cut at
    ``max_length`` tokens, as the trainer cuts them.

    Returns what a manifest says of them, with a SHA-256 over the files in order of their numbers. Raises RecordError
    for a line that is no row, ModelError for tokens that the target does not know, and for too little memory or room on
    the disk.
    """
    left_out: Counter[str] = Counter()
    needed = sum(reading.bytes_of(row) for row in _usable(path, reading, max_length, Counter()))
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ModelError(
            f"{folder}: the features take {needed / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free; make room, or lower "
            "retrain.data.max_rows"
        )
    digest, rows, tokens, size = hashlib.sha256(), 0, 0, 0
    for row in _usable(path, reading, max_length, left_out):
        group = rows // GROUP * GROUP
        place = folder / f"rows_{group}-{group + GROUP}" / f"data_{rows}.ckpt"
        place.parent.mkdir(exist_ok=True)
        file = io.BytesIO()
        torch.save(_computed(reading, row), file)
        place.write_bytes(file.getvalue())
        digest.update(file.getvalue())
        rows, tokens, size = rows + 1, tokens + len(row.ids), size + file.tell()
    return {
        "format": FORMAT,
        "strategy": reading.kind,
        "rows": rows,
        "tokens": tokens,
        "bytes": size,
        "sha256": digest.hexdigest(),
        "left_out": dict(left_out),
        "max_length": max_length,
        "dtype": str(reading.target.dtype).removeprefix("torch."),
        "layers": [layer - 1 for layer in reading.layers],
        "layer_id_convention": "0-based layer output",
    }


def _computed(reading: Reading, row: Row) -> dict[str, torch.Tensor]:
    try:
        return reading.features(row)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(f"no memory for a row of {len(row.ids)} tokens; lower shadow.batch_tokens") from None


def _usable(path: Path, reading: Reading, max_length: int, left_out: Counter[str]) -> Iterator[Row]:
    for where, row in _rows(path):
        if max(row.ids) >= reading.target.token_ids or min(row.ids) < 0:
            raise ModelError(f"{where}: a token id that the target does not have; give the target that served it")
        cut = Row(row.ids[:max_length], row.mask[:max_length])
        if cut.trains:
            yield cut
        else:
            left_out["nothing_to_learn"] += 1


def _rows(path: Path) -> Iterable[tuple[str, Row]]:
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        try:
            found = orjson.loads(line)
            row = Row(found["input_ids"], found["loss_mask"])
            whole = len(row.ids) == len(row.mask) > 0 and all(isinstance(one, int) for one in (*row.ids, *row.mask))
        except (orjson.JSONDecodeError, KeyError, TypeError):
            whole = False
        if not whole:
            raise RecordError(f'{where}: no training row; write {{"input_ids", "loss_mask"}}, two lists of one length')
        yield where, row
