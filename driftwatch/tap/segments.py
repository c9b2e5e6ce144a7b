"""Which segment a request belongs to: its labels from headers, the JSON body, or the body's size."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import orjson
from jsonpath_ng.exceptions import JSONPathError
from jsonpath_ng.parser import parse

from driftwatch.errors import SettingsError
from driftwatch.records import segment_id
from driftwatch.settings import Segment
from driftwatch.tap.asgi import Headers
from driftwatch.tap.places import Places

NONE = "none"
"""Value of a label whose header or field is missing, or is no plain value."""
OTHER = "other"
"""Value of a label, and name of a segment, over the cap."""
MAX_VALUES = 100
MAX_LENGTH = 128
CREDENTIALS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"})


@dataclass(frozen=True, slots=True)
class _Source:
    """What labels are read from."""

    headers: dict[bytes, bytes]
    body: Any
    """The parsed body; None if it is no JSON, was not kept, or no label needs it."""
    size: int | None


class Segments:
    """Labels requests. Remembers which values it has seen, to keep their number within the caps.

    A segment that was silent for a day gives its place to one that needs it, and ``freed`` is told.
    """

    def __init__(
        self,
        segments: list[Segment],
        *,
        max_segments: int = 100,
        clock: Callable[[], float] = time.monotonic,
        freed: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._labels = [_Label(segment, clock) for segment in segments]
        self._reads_body = any(segment.json_path for segment in segments)
        self._places = Places(max_segments, clock=clock, freed=freed)

    def of(self, headers: Headers, body: bytes | None, size: int | None) -> tuple[str, dict[str, str]]:
        """A request's segment and labels. Over ``max_segments`` the segment is ``other``; the labels stay its own."""
        parsed = None
        if self._reads_body and body is not None:
            try:
                parsed = orjson.loads(body)
            except orjson.JSONDecodeError:
                parsed = None
        source = _Source(dict(headers), parsed, size)
        labels = {label.name: label.of(source) for label in self._labels}
        segment = segment_id(labels)
        return segment if self._places.take(segment) else OTHER, labels


class _Label:
    """One label, capped at MAX_VALUES values beside NONE."""

    def __init__(self, segment: Segment, clock: Callable[[], float]) -> None:
        self.name = segment.label
        self._edges = segment.bucket
        self._read = _reader(segment)
        self._places = Places(MAX_VALUES, clock=clock)

    def of(self, source: _Source) -> str:
        value = self._read(source)
        if self._edges is not None:
            return bucket(value, self._edges)
        text = _plain(value)
        return text if text == NONE or self._places.take(text) else OTHER


def bucket(value: object, edges: list[float]) -> str:
    """The range that a number falls in: ``<2048``, ``2048-16384``, ``>=16384``; ``none`` if it is none."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return NONE
    if math.isnan(number):
        return NONE
    if number < edges[0]:
        return f"<{_edge(edges[0])}"
    for low, high in pairwise(edges):
        if number < high:
            return f"{_edge(low)}-{_edge(high)}"
    return f">={_edge(edges[-1])}"


def _reader(segment: Segment) -> Callable[[_Source], object]:
    if segment.header:
        if segment.header.lower() in CREDENTIALS:
            raise SettingsError(
                f"`segments`: label {segment.label!r} reads the header {segment.header!r}, which holds a credential;"
                " name another header"
            )
        name = segment.header.lower().encode()
        return lambda source: source.headers.get(name, b"").decode(errors="replace")
    if segment.json_path:
        try:
            path = parse(segment.json_path)
        except (JSONPathError, ValueError, AttributeError) as error:
            raise SettingsError(
                f"`segments`: label {segment.label!r}: {segment.json_path!r} is no JSONPath"
                f" ({' '.join(str(error).split())})"
            ) from None

        def find(source: _Source) -> object:
            found = path.find(source.body) if source.body is not None else []
            return found[0].value if found else None

        return find
    return lambda source: source.size


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)[:MAX_LENGTH] or NONE
    return NONE


def _edge(edge: float) -> str:
    return str(int(edge)) if edge.is_integer() else str(edge)
