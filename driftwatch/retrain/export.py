"""Training data: served tokens as SpecForge reads them, with a manifest of what they are and where they came from.

``train.jsonl`` and ``eval.jsonl`` hold pre-tokenised rows, ``{"input_ids", "loss_mask"}``, the mask 1 on the target's
output tokens alone (SpecForge 0.2.0, ``data.prompts_path``). Where the messages of a request are known,
``conversations.jsonl`` holds them too, ``{"id", "conversations": [{"role", "content"}]}`` (``data.train_data_path``),
for answers to be generated anew. Offline features, which the shadow computes, may lie beside them in ``features``.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import select

from driftwatch.records import segment_labels
from driftwatch.retrain.publish import LAST, publish, uri
from driftwatch.retrain.redaction import Redactor, redactor
from driftwatch.retrain.selection import Choice, Occasion, choose, for_evaluation
from driftwatch.settings import TrainingData
from driftwatch.store import training
from driftwatch.store.connection import Store
from driftwatch.store.schema import Cell, Deployment, Replay
from driftwatch.store.training import Served, Tokens

TRAIN = "train.jsonl"
EVAL = "eval.jsonl"
CONVERSATIONS = "conversations.jsonl"
FEATURES = "features"
MANIFEST = LAST
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Source:
    """Whose requests: those that a deployment served, judged by a draft, on one occasion."""

    deployment_id: int
    draft: str
    occasion: Occasion


@dataclass(frozen=True)
class Export:
    """What was written, as a request to retrain tells it; ``rows`` and ``sha256`` are those of ``train.jsonl``."""

    format: str
    uri: str
    sha256: str
    rows: int
    loss_tokens: int
    since: float
    place: str
    eval_uri: str
    eval_sha256: str
    eval_rows: int
    conversations_uri: str | None
    conversations: int
    manifest_uri: str
    max_length: int
    pools: dict[str, int]
    segments: dict[str, int]
    left_out: dict[str, int]
    redacted: bool


def source_of(cell: Cell, start: float, rules: TrainingData, *, earlier: bool = True) -> Source:
    """The requests of a cell since a time, and what goes with them."""
    tenant = segment_labels(cell.segment).get(rules.tenant_label)
    split = cell.split if cell.channel == "shadow" else None
    return Source(cell.deployment_id, cell.draft, Occasion(cell.segment, split, start, tenant, earlier))


@dataclass(frozen=True)
class Chosen:
    """Requests that were chosen for an export, without their tokens."""

    source: Source
    rows: Mapping[int, Served]
    choice: Choice

    @property
    def of_the_event(self) -> int:
        return self.choice.counts.get("event", 0)


def choose_from(store: Store, source: Source, rules: TrainingData) -> Chosen:
    """Choose among what is kept."""
    with store.read() as session:
        rows = training.served(session, source.deployment_id, source.draft)
    choice = choose(rows, source.occasion, rules)
    return Chosen(source, {row.sample_id: row for row in rows if row.sample_id in choice.pools}, choice)


def export(
    store: Store,
    chosen: Chosen,
    rules: TrainingData,
    *,
    place: str,
    beside: Mapping[str, str] | None = None,
    featured: Callable[[Path], dict[str, Any]] | None = None,
) -> tuple[Export, list[int]]:
    """Write training data to a place, a folder or an fsspec URL, whole or not at all; ``beside`` are further files.

    ``featured`` gets the folder once the rows lie in it, to add what is computed over them, and returns what the
    manifest says of that.

    Returned with the ids of the samples in ``train.jsonl``. A place that holds something, from a run that died before
    it was recorded, is written anew. Raises StoreError if it cannot be written, SettingsError if there is no
    such redactor.
    """
    redact = redactor(rules.redact)

    def write(folder: Path) -> tuple[Export, list[int]]:
        written = _Writer(redact, for_evaluation(rules.eval_share))
        with store.read() as session:
            written.write(folder, chosen.rows, training.tokens(session, list(chosen.rows)))
        for name, text in (beside or {}).items():
            (folder / name).write_text(text)
        features = None if featured is None else featured(folder)
        done = _export(written, chosen, place, redacted=rules.redact is not None)
        manifest = _manifest(store, chosen.source, written, done) | {"features": features}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        with store.write():  # a leader that was replaced meanwhile ends here: what its successor announced stays
            pass
        return done, written.trained

    return publish(place, write)


@dataclass
class _File:
    digest: Any = field(default_factory=hashlib.sha256)
    rows: int = 0


@dataclass
class _Writer:
    """Rows on their way into files, each content once."""

    redact: Redactor
    is_kept: Callable[[Served], bool]
    files: dict[str, _File] = field(default_factory=lambda: {TRAIN: _File(), EVAL: _File(), CONVERSATIONS: _File()})
    seen: set[bytes] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)
    segments: Counter[str] = field(default_factory=Counter)
    loss_tokens: int = 0
    longest: int = 0
    served: list[float] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)

    def write(self, folder: Path, chosen: Mapping[int, Served], tokens: Iterator[Tokens]) -> None:
        handles = {name: (folder / name).open("wb") for name in self.files}
        try:
            for one in tokens:
                for name, row in self._rows(chosen[one.sample_id], one):
                    line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
                    handles[name].write(line)
                    self.files[name].digest.update(line)
                    self.files[name].rows += 1
        finally:
            for handle in handles.values():
                handle.close()
        if not self.files[CONVERSATIONS].rows:
            (folder / CONVERSATIONS).unlink()

    def _rows(self, request: Served, tokens: Tokens) -> Iterator[tuple[str, dict[str, Any]]]:
        ids = tokens.prompt + tokens.output
        content = hashlib.sha256(repr(ids).encode()).digest()
        if content in self.seen:
            self.left_out["duplicate"] += 1
            return
        self.seen.add(content)
        about = {"id": request.request_id, "labels": request.labels}
        mask = [0] * len(tokens.prompt) + [1] * len(tokens.output)
        row = self.redact(about | {"input_ids": ids, "loss_mask": mask})
        if row is None:
            self.left_out["redacted"] += 1
            return
        name = EVAL if self.is_kept(request) else TRAIN
        self.served.append(request.served_at)
        if name == TRAIN:
            self.trained.append(request.sample_id)
            self.segments[request.segment] += 1
            self.loss_tokens += sum(row["loss_mask"])
            self.longest = max(self.longest, len(row["input_ids"]))
        yield name, {key: row[key] for key in ("input_ids", "loss_mask")}
        if name == TRAIN and (turns := _turns(tokens.text)) is not None:
            spoken = self.redact(about | {"conversations": turns})
            if spoken is not None:
                yield CONVERSATIONS, {"id": request.request_id, "conversations": spoken["conversations"]}


def _turns(text: dict[str, Any] | None) -> list[dict[str, Any]] | None:
    """Messages and answer as SpecForge's conversations; None where they are not known, or hold more than text."""
    if not text or not text.get("messages") or not isinstance(text.get("output"), str):
        return None
    turns = [{"role": one.get("role"), "content": one.get("content")} for one in text["messages"]]
    if not all(isinstance(one["role"], str) and isinstance(one["content"], str) for one in turns):
        return None
    return [*turns, {"role": "assistant", "content": text["output"]}]


def _export(written: _Writer, chosen: Chosen, place: str, *, redacted: bool) -> Export:
    train, kept, spoken = (written.files[name] for name in (TRAIN, EVAL, CONVERSATIONS))
    return Export(
        format="pretokenised-jsonl",
        uri=uri(place, TRAIN),
        sha256=train.digest.hexdigest(),
        rows=train.rows,
        loss_tokens=written.loss_tokens,
        since=chosen.source.occasion.start,
        place=place,
        eval_uri=uri(place, EVAL),
        eval_sha256=kept.digest.hexdigest(),
        eval_rows=kept.rows,
        conversations_uri=uri(place, CONVERSATIONS) if spoken.rows else None,
        conversations=spoken.rows,
        manifest_uri=uri(place, MANIFEST),
        max_length=written.longest,
        pools=chosen.choice.counts,
        segments=dict(written.segments),
        left_out=dict(chosen.choice.left_out) | dict(written.left_out),
        redacted=redacted,
    )


def _manifest(store: Store, source: Source, written: _Writer, done: Export) -> dict[str, Any]:
    with store.read() as session:
        deployment = session.get_one(Deployment, source.deployment_id)
        fingerprint = session.scalars(
            select(Replay.fingerprint).where(Replay.draft == source.draft).order_by(Replay.id.desc()).limit(1)
        ).first()
    first, last = (min(written.served), max(written.served)) if written.served else (None, None)
    return {
        "schema_version": SCHEMA_VERSION,
        "data": asdict(done),
        "model": deployment.model,
        "deployment": deployment.facts,
        "draft": {"name": source.draft, "sha256": fingerprint},
        "segment": source.occasion.segment,
        "labels": segment_labels(source.occasion.segment or "all"),
        "split": source.occasion.split,
        "served": {"first": _time(first), "last": _time(last)},
    }


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
