"""The record format: one request and its answer, one JSON object a line.

This is the only way samples enter driftwatch: from the tap, from a gateway or an application, or from a file. An absent
field means unknown, never a default. Unknown fields are kept.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Annotated, Any, Literal, Self, cast
from urllib.parse import quote, unquote

import zstandard
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from driftwatch.errors import RecordError

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Purpose = Literal["estimate", "mining"]


class Timing(BaseModel):
    """What the user waited for, in seconds."""

    model_config = ConfigDict(extra="allow")

    ttft_s: float | None = Field(None, ge=0)
    tpot_s: float | None = Field(None, ge=0)
    e2e_s: float | None = Field(None, ge=0)


class EngineFigures(BaseModel):
    """What the engine itself says of one request, in the words of the acceptance definitions (no bonus tokens)."""

    model_config = ConfigDict(extra="allow")

    windows: NonNegativeInt | None = None
    drafted: NonNegativeInt | None = None
    accepted: NonNegativeInt | None = None
    accepted_histogram: list[NonNegativeInt] | None = None
    accepted_per_window: list[NonNegativeInt] | None = None
    drafted_per_window: list[NonNegativeInt] | None = None


class Record(BaseModel):
    """One request and its answer: as token ids, or as text that is tokenised later and then marked ``retokenised``."""

    model_config = ConfigDict(extra="allow")

    id: str = Field(min_length=1, max_length=256)
    prompt_token_ids: list[TokenId] | None = None
    output_token_ids: list[TokenId] | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    output: str | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = None
    labels: dict[str, str] = {}
    ts: AwareDatetime | None = None
    session: str | None = Field(None, max_length=256)
    model: str | None = None
    adapter: str | None = None
    finish_reason: str | None = None
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    cached_tokens: NonNegativeInt | None = None
    timing: Timing | None = None
    engine: EngineFigures | None = None
    purpose: Purpose = "estimate"
    deployment: dict[str, str] = {}
    """Facts known of what served the request: target, draft, engine, version, quantisation ..."""

    @model_validator(mode="after")
    def _has_text_or_ids(self) -> Self:
        if self.has_ids:
            return self
        if (self.prompt_token_ids is not None or self.output_token_ids is not None) and self.output is None:
            raise ValueError("prompt_token_ids and output_token_ids belong together: one is missing or empty")
        if self.output is None or (self.messages is None and self.prompt is None):
            raise ValueError(
                "needs prompt_token_ids and output_token_ids, or output with messages or prompt, to be replayed"
            )
        return self

    @property
    def has_ids(self) -> bool:
        return bool(self.prompt_token_ids) and bool(self.output_token_ids)


def parse_record(data: bytes | str, *, where: str) -> Record:
    """Parse one JSON object. Raises RecordError naming ``where``, the field and what is wrong with it."""
    try:
        return Record.model_validate_json(data)
    except ValidationError as error:
        raise RecordError(f"{where}: {explain(error)}") from None


def explain(error: ValidationError) -> str:
    """The first problem of a validation error in one line: the field, what is wrong, and the value."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return f"not a JSON object ({first['ctx']['error']})"
    if first["type"] in ("missing", "value_error") or not field:
        return f"{field}: {message}" if field else message
    value = repr(first["input"])
    return f"{field}: {message} (got {value if len(value) <= 60 else value[:57] + '...'})"


def open_lines(path: Path) -> IO[bytes]:
    """Open a .jsonl file, gzip and zstandard decompressed by suffix. Raises RecordError if it cannot be read."""
    try:
        if path.suffix == ".gz":
            return cast("IO[bytes]", gzip.open(path, "rb"))
        if path.suffix == ".zst":
            return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(path.open("rb")))
        return path.open("rb")
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror or error}; give a .jsonl, .jsonl.gz or .jsonl.zst file") from None


def read_records(paths: Iterable[Path]) -> Iterator[Record]:
    """Yield the records of JSONL files in order; blank lines are skipped. Raises RecordError naming file and line."""
    for path in paths:
        with open_lines(path) as lines:
            try:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield parse_record(line, where=f"{path}:{number}")
            except (OSError, EOFError, zstandard.ZstdError) as error:
                raise RecordError(f"{path}: cannot be decompressed ({error}); is the file complete?") from None


def segment_id(labels: Mapping[str, str]) -> str:
    """A segment's id: its labels sorted, ``k=v`` joined by commas, percent-encoded; ``all`` without labels."""
    if not labels:
        return "all"
    return ",".join(f"{quote(key, safe='')}={quote(value, safe='')}" for key, value in sorted(labels.items()))


def segment_labels(segment: str) -> dict[str, str]:
    """Inverse of :func:`segment_id`."""
    if segment in ("all", "other"):
        return {}
    pairs = (part.partition("=") for part in segment.split(","))
    return {unquote(key): unquote(value) for key, _, value in pairs}
