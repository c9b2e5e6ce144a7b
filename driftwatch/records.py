"""The record format: one request and its answer, one JSON object a line.

This is the only way samples enter driftwatch: from the tap, from a gateway or an application, or from a file. An absent
field means unknown, never a default. Unknown fields are kept.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Annotated, Any, Literal, Self, cast
from urllib.parse import quote, unquote

import orjson
import zstandard
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from driftwatch.errors import RecordError

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Name = Annotated[str, Field(max_length=256, pattern=r"^[^\x00]*$")]
FactName = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Purpose = Literal["estimate", "mining"]
EMPTY = {"empty": True}
"""What validation is told where empty records may pass."""


class Timing(BaseModel):
    """What the user waited for, in seconds."""

    model_config = ConfigDict(extra="allow", strict=True)

    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    e2e_s: Seconds | None = None


class EngineFigures(BaseModel):
    """What the engine itself says of one request, in the words of the acceptance definitions (no bonus tokens)."""

    model_config = ConfigDict(extra="allow", strict=True)

    windows: Count | None = None
    drafted: Count | None = None
    accepted: Count | None = None
    accepted_histogram: list[Count] | None = None
    accepted_per_window: list[Count] | None = None
    drafted_per_window: list[Count] | None = None
    running: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = None
    """Requests that it was decoding at about that time."""


class Record(BaseModel):
    """One request and its answer: as token ids, or as text that is tokenised later and then marked ``retokenised``."""

    model_config = ConfigDict(extra="allow", strict=True)

    id: Name = Field(min_length=1)
    prompt_token_ids: list[TokenId] | None = None
    output_token_ids: list[TokenId] | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    output: str | None = None
    temperature: float | None = Field(None, ge=0, le=1e6, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    labels: dict[Name, Name] = Field({}, max_length=32)
    ts: AwareDatetime | None = None
    session: Name | None = None
    model: Name | None = None
    adapter: Name | None = None
    finish_reason: Name | None = None
    weight: float = Field(1.0, gt=0, le=1e9)
    cached_tokens: Count | None = None
    timing: Timing | None = None
    engine: EngineFigures | None = None
    purpose: Purpose = "estimate"
    no_train: bool | None = None
    """True: the request must not become training data."""
    deployment: dict[FactName, Name] = Field({}, max_length=32)
    """Facts known of what served the request: target, draft, engine, version, quantisation ..."""

    @model_validator(mode="after")
    def _has_text_or_ids(self, info: ValidationInfo) -> Self:
        if self.has_ids or (info.context == EMPTY and self.is_empty):
            return self
        if (self.prompt_token_ids is not None or self.output_token_ids is not None) and self.output is None:
            raise ValueError(
                "prompt_token_ids and output_token_ids belong together: one is missing or empty; give both, or leave "
                "the record out"
            )
        if self.output is None or (self.messages is None and self.prompt is None):
            raise ValueError(
                "needs prompt_token_ids and output_token_ids, or output with messages or prompt, to be replayed"
            )
        return self

    @property
    def has_ids(self) -> bool:
        return bool(self.prompt_token_ids) and bool(self.output_token_ids)

    @property
    def is_empty(self) -> bool:
        """Whether it says that nothing was asked or answered: token ids, no text, and a list of them without any."""
        given = self.prompt_token_ids is not None and self.output_token_ids is not None
        return given and not self.has_ids and self.output is None


def parse_record(data: bytes | str, *, where: str, empty: bool = False) -> Record:
    """Parse one JSON object; ``empty`` ones (:attr:`Record.is_empty`) are refused unless asked for.

    Raises RecordError naming ``where``, the field and what is wrong with it.
    """
    try:
        orjson.loads(data)  # the stricter reader: no NaN, no endless nesting
        return Record.model_validate_json(data, context=EMPTY if empty else None)
    except orjson.JSONDecodeError as error:
        raise RecordError(f"{where}: not a JSON object ({error})") from None
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


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a JSONL file with their number from 1, blank ones left out. Raises RecordError."""
    with open_lines(path) as lines:
        try:
            yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise RecordError(f"{path}: cannot be read to its end ({error}); is the file complete?") from None


def read_records(paths: Iterable[Path]) -> Iterator[Record]:
    """Yield the records of JSONL files in order, empty ones too: history has requests that came to nothing, and whoever
    reads it counts them as skipped. Raises RecordError naming file and line."""
    for path in paths:
        for number, line in read_lines(path):
            yield parse_record(line, where=f"{path}:{number}", empty=True)


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
