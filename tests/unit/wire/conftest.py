"""Recorded exchanges of a real vLLM 0.32, as the wire modules see them."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from driftwatch.wire.exchange import Exchange

DATA = Path(__file__).parents[2] / "data" / "wire" / "exchanges.jsonl"


@dataclass(frozen=True)
class Recorded:
    path: str
    request: bytes
    status: int
    headers: dict[str, str]
    pieces: list[bytes]
    """The answer's body as the socket gave it, chunked framing removed."""

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def exchange(self, **changes: object) -> Exchange:
        values: dict[str, object] = {
            "id": "r1",
            "path": self.path,
            "request": self.request,
            "status": self.status,
            "headers": self.headers,
            "response": self.body,
        }
        return Exchange(**{**values, **changes})  # type: ignore[arg-type]


def _load(line: str) -> tuple[str, Recorded]:
    row = json.loads(line)
    request = base64.b64decode(row["request_b64"]).partition(b"\r\n\r\n")[2]
    raw = b"".join(base64.b64decode(data) for _, data in row["response_chunks"])
    head, _, rest = raw.partition(b"\r\n\r\n")
    lines = (header.decode().partition(": ") for header in head.split(b"\r\n")[1:])
    headers = {name.lower(): value for name, _, value in lines}
    chunked = headers.get("transfer-encoding") == "chunked"
    pieces = _dechunk(rest) if chunked else [rest]
    return row["kind"], Recorded(row["path"], request, row["status"], headers, pieces)


def _dechunk(data: bytes) -> list[bytes]:
    pieces = []
    while data:
        size, _, data = data.partition(b"\r\n")
        pieces.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return [piece for piece in pieces if piece]


@pytest.fixture(scope="session")
def recorded() -> dict[str, Recorded]:
    """By kind, see the fixtures' description of the kinds."""
    return dict(_load(line) for line in DATA.read_text().splitlines())
