"""``driftwatch ingest``: records from files into control."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import httpx

from driftwatch.cli.options import files, with_settings
from driftwatch.errors import DriftwatchError
from driftwatch.records import Record, read_records
from driftwatch.settings import Settings, secret

BATCH_RECORDS = 500
BATCH_BYTES = 8_000_000


@click.command()
@files
@with_settings
def ingest(files: tuple[Path, ...], settings: Settings) -> None:
    """Send the records of FILES to control; what it already has counts as duplicate."""
    token = secret(settings.control.token, settings.control.token_file, "control.token_file")
    headers = {"content-type": "application/x-ndjson"} | ({"authorization": f"Bearer {token}"} if token else {})
    stored = duplicates = 0
    with httpx.Client(base_url=settings.tap.control_url, headers=headers, timeout=60, trust_env=False) as client:
        for body in _bodies(read_records(files)):
            answer = _post(client, body)
            stored += answer["stored"]
            duplicates += answer["duplicates"]
    click.echo(f"stored {stored}, duplicates {duplicates}")


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
