"""What a generation loop gives to measure: the times of its windows, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Lap:
    """One step of a loop, in seconds: what each proposal took, and all the rest of the step."""

    verify: float
    """The target's pass over the last token and the proposals, its choices, and what the loop does around it."""
    drafts: Sequence[float] = ()
    """One entry a proposal; empty for a plain step."""


class Loop(Protocol):
    """A way to decode, at a batch and with a context of its choosing."""

    @property
    def most_sequences(self) -> int | None:
        """The largest batch that it can do; None is any."""

    def laps(self, batch: int, context: int, gamma: int) -> list[Lap]:
        """A few steps of ``batch`` sequences with ``context`` tokens each in the cache; gamma 0 is plain decoding.

        Raises torch's out-of-memory error as it comes.
        """
