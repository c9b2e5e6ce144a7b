"""What the tap asks of an engine beyond what the client asked, so that it can be taken out of the answer again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Injected:
    """A request that asks for more than the client did, and what was added."""

    body: bytes
    ids: bool
    """Ids were asked for, in the manner of vLLM: without, their fields are there and null."""
    usage: bool
    """The usage event of a stream was asked for."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Request headers to add."""
    sglext: frozenset[str] = frozenset()
    """Keys of SGLang's ``sglext`` that only the tap asked for."""
    dropped: frozenset[str] = frozenset()
    """Keys of an answer or its choices that are not there unless asked for."""
