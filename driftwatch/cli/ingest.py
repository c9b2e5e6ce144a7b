"""``driftwatch ingest``: records, engines' logs and KServe's events from files into control."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import httpx
import orjson

from driftwatch.cli.options import files, with_settings
from driftwatch.errors import DriftwatchError, RecordError
from driftwatch.records import Record, parse_record, read_lines
from driftwatch.settings import Settings, secret
from driftwatch.wire import kserve, logs, printed
from driftwatch.wire.exchange import Skip

BATCH_RECORDS = 500
BATCH_BYTES = 8_000_000
PICKLE = b"\x80"
_TIME = re.compile(rb"^\[\d{4}-\d\d-\d\d [^\]]*\] (?=\{)")
"""As SGLang's loggers put it before a line, JSON or not."""


@click.command()
@files
@with_settings
def ingest(files: tuple[Path, ...], settings: Settings) -> None:
    """Send what FILES hold to control: records, SGLang's metrics export or request log (JSON or text), vLLM's request
    log, TensorRT-LLM's perf metrics, KServe's inference events. What control already has counts as duplicate."""
    token = secret(settings.control.token, settings.control.token_file, "control.token_file")
    headers = {"content-type": "application/x-ndjson"} | ({"authorization": f"Bearer {token}"} if token else {})
    stored = duplicates = 0
    skipped: Counter[str] = Counter()
    with httpx.Client(base_url=settings.tap.control_url, headers=headers, timeout=60, trust_env=False) as client:
        for body in _bodies(read(files, skipped)):
            answer = _post(client, body)
            stored += answer["stored"]
            duplicates += answer["duplicates"]
    click.echo(f"stored {stored}, duplicates {duplicates}")
    if skipped:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(skipped.items()))
        click.echo(f"not read: {skipped.total()} lines ({reasons})", err=True)


def read(paths: Iterable[Path], skipped: Counter[str]) -> Iterator[Record]:
    """Records out of files whose kind shows in each line; lines that give none are counted in ``skipped``, and so are
    records of requests that came to nothing.

    Raises RecordError for a line that is none of the known kinds and no record either, naming file and line. Where
    requests are among all that an engine prints, other lines, JSON or not, are counted instead: only its end shows that
    a file has none.
    """
    joiner, reader = kserve.Joiner(), printed.Reader()
    for path in paths:
        odd: RecordError | None = None
        others, log = 0, False
        for number, line in _lines(path):
            value = _json(line)
            told = reader.tells(line.decode(errors="replace")) if value is None else logs.is_request(value)
            log |= told
            try:
                record = _read(line, value, joiner, reader if told else None, where=f"{path}:{number}")
            except Skip as skip:
                skipped[skip.reason] += 1
                continue
            except RecordError as error:
                others += 1
                odd = odd or error
                continue
            if odd is not None and not log:
                raise odd
            if record is not None and record.is_empty:
                skipped["too_short"] += 1
            elif record is not None:
                yield record
        if odd is not None and not log:
            raise RecordError(f"{odd}; and it is no request log, where other lines may be: no line tells of a request")
        if others:
            skipped["no_request"] += others
    if waiting := len(joiner.waiting) + reader.waiting:
        skipped["unpaired"] += waiting


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    for number, line in read_lines(path):
        if number == 1 and line.startswith(PICKLE):
            raise RecordError(f"{path}: a pickle, which is not read: loading it could run anything in it")
        yield number, line


def _json(line: bytes) -> dict[str, Any] | None:
    """The object of a line, a log's time before it or not."""
    try:
        value = orjson.loads(_TIME.sub(b"", line, count=1))
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _read(
    line: bytes, value: dict[str, Any] | None, joiner: kserve.Joiner, reader: printed.Reader | None, *, where: str
) -> Record | None:
    """``reader``: where a text line tells of a request. Raises Skip, and RecordError for a line of no known kind."""
    if value is None and reader is not None:
        return reader.take(line.decode(errors="replace"))
    if value is not None and kserve.is_event(value):
        return joiner.take(value)
    if value is not None and (record := logs.record(value)) is not None:
        return record
    return parse_record(line, where=where, empty=True)


def _bodies(records: Iterable[Record]) -> Iterator[bytes]:
    lines: list[bytes] = []
    size = 0
    for record in records:
        line = record.model_dump_json(exclude_unset=True).encode()
        if lines and (len(lines) >= BATCH_RECORDS or size + len(line) > BATCH_BYTES):
            yield b"\n".join(lines)
            lines, size = [], 0
        lines.append(line)
        size += len(line) + 1
    if lines:
        yield b"\n".join(lines)


def _post(client: httpx.Client, body: bytes) -> dict[str, int]:
    try:
        response = client.post("/v1/samples", content=body)
    except httpx.HTTPError as error:
        raise DriftwatchError(f"control at {client.base_url}: {error}; is it running?") from None
    if response.status_code != 201:
        raise DriftwatchError(f"control at {client.base_url} answered {response.status_code}: {response.text[:300]}")
    answer: dict[str, int] = response.json()
    return answer
