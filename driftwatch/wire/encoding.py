"""Content encodings of answers: gzip, deflate and zstd are undone, others are not understood."""

from __future__ import annotations

import zlib

import zstandard

from driftwatch.wire.exchange import Skip

MAX_DECODED = 64 * 1024 * 1024
"""A compressed answer that unfolds to more bytes than this is not read: it would be a bomb, not a completion."""


def decode(data: bytes, encoding: str) -> bytes:
    """Undo a ``content-encoding``, several in reverse order. Raises Skip: ``undecodable``."""
    for name in reversed([part.strip().lower() for part in encoding.split(",") if part.strip()]):
        data = _decode_one(data, name)
    return data


def _decode_one(data: bytes, name: str) -> bytes:
    try:
        if name == "identity":
            return data
        if name in ("gzip", "x-gzip"):
            return _inflate(data, 16 + zlib.MAX_WBITS)
        if name == "deflate":
            # Meant is zlib; some servers send the bare deflate stream, which has no zlib header (low nibble 8).
            return _inflate(data, zlib.MAX_WBITS if data[:1] and data[0] & 15 == 8 else -zlib.MAX_WBITS)
        if name == "zstd":
            with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as reader:
                return _bounded(reader.read(MAX_DECODED + 1))
    except (zlib.error, zstandard.ZstdError):
        pass
    raise Skip("undecodable")


def _inflate(data: bytes, wbits: int) -> bytes:
    out = b""
    while data:  # gzip allows several members, one behind the other
        inflater = zlib.decompressobj(wbits)
        out = _bounded(out + inflater.decompress(data, MAX_DECODED + 1 - len(out)))
        if not inflater.eof:
            raise Skip("undecodable")
        data = inflater.unused_data
    return out


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_DECODED:
        raise Skip("undecodable")
    return data
