"""An exchange: one request and its answer as seen on the wire, before anybody has read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, get_args

SkipReason = Literal[
    "aborted",
    "engine_error",
    "incomplete",
    "list_prompt",
    "malformed",
    "no_output",
    "several_choices",
    "undecodable",
    "unsupported",
]
SKIP_REASONS: tuple[SkipReason, ...] = get_args(SkipReason)


class Skip(Exception):
    """This exchange gives no record, for a reason from the closed list. Nothing is wrong with the tap."""

    def __init__(self, reason: SkipReason) -> None:
        super().__init__(reason)
        self.reason: SkipReason = reason


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Exchange:
    """Raw bytes of one exchange and what its observer measured. Request headers are not kept: they hold credentials."""

    id: str
    path: str
    request: bytes
    status: int
    headers: Mapping[str, str]
    """Of the answer, names in lower case; only ``content-type`` and ``content-encoding`` are looked at."""
    response: bytes
    complete: bool = True
    """False when the client went away or the engine broke off."""
    labels: Mapping[str, str] = field(default_factory=dict)
    session: str | None = None
    started_at: datetime | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    deployment: Mapping[str, str] = field(default_factory=dict)
    no_train: bool = False
    """The client forbade training on this request."""

    @property
    def streamed(self) -> bool:
        return media_type(self.headers) == "text/event-stream"


def media_type(headers: Mapping[str, str]) -> str:
    """The media type of a ``content-type``, without parameters; empty without one."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()
