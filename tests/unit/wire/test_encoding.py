from __future__ import annotations

import gzip
import zlib

import pytest
import zstandard

from driftwatch.wire import encoding
from driftwatch.wire.encoding import decode
from driftwatch.wire.exchange import Skip

TEXT = b'{"a": "' + b"x" * 5000 + b'"}'
RAW_DEFLATE = zlib.compressobj(wbits=-15)
RAW = RAW_DEFLATE.compress(TEXT) + RAW_DEFLATE.flush()


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (TEXT, ""),
        (TEXT, "identity"),
        (gzip.compress(TEXT), "gzip"),
        (gzip.compress(TEXT[:100]) + gzip.compress(TEXT[100:]), "GZIP"),
        (zlib.compress(TEXT), "deflate"),
        (RAW, "deflate"),
        (zstandard.compress(TEXT), "zstd"),
        (zstandard.compress(gzip.compress(TEXT)), "gzip, zstd"),
    ],
)
def test_decodes(data: bytes, name: str) -> None:
    assert decode(data, name) == TEXT


@pytest.mark.parametrize(
    ("data", "name"),
    [(b"?", "br"), (TEXT, "gzip"), (gzip.compress(TEXT)[:-9], "gzip"), (TEXT, "zstd"), (TEXT, "deflate")],
)
def test_skips_what_cannot_be_decoded(data: bytes, name: str) -> None:
    with pytest.raises(Skip, match="undecodable"):
        decode(data, name)


@pytest.mark.parametrize(("data", "name"), [(gzip.compress(TEXT), "gzip"), (zstandard.compress(TEXT), "zstd")])
def test_does_not_unfold_a_bomb(data: bytes, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MAX_DECODED", 1000)
    with pytest.raises(Skip, match="undecodable"):
        decode(data, name)
