"""What every head here has in common, and what it is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch

Context = TypeVar("Context")

Kind = Literal["dflash", "domino", "peagle", "mtp"]

PIECE = 8192
"""Context positions computed at a time."""


@dataclass(frozen=True)
class Reads:
    """What a head needs of its target, and how it proposes."""

    kind: Kind
    layers: tuple[int, ...] | None
    """Indices into Hugging Face's ``hidden_states``, those that every trainer reads unless told otherwise where there
    are none; None is the last hidden state after the final norm."""
    width: int
    """Of a hidden state of the target."""
    slots: int | None = None
    """Proposals of a window, where the head has a fixed number."""
    mask: int | None = None
    """The token id that stands for what is not known yet."""


class Head(Protocol[Context]):
    """A loaded head. A window starts behind the token at position ``at`` of a sample: its depth-d proposal concerns the
    token at position ``at + 1 + d``."""

    @property
    def reads(self) -> Reads: ...

    def project(self, layers: Sequence[torch.Tensor]) -> torch.Tensor:
        """What is kept of the target's hidden states, [..., width] each: [..., hidden]."""

    def context(self, states: torch.Tensor, embedded: torch.Tensor) -> Context:
        """All that windows of one sample share, from its projected states [T, hidden] and embedded tokens [T, hidden].
        A window sees what lies before it alone."""

    def propose(
        self, context: Context, embedded: torch.Tensor, at: torch.Tensor, depths: int
    ) -> Iterator[torch.Tensor]:
        """By depth, what the output head reads for the windows at ``at`` [R], ascending: [R, hidden] each."""


def pieces(length: int) -> Iterator[slice]:
    """A context's positions, some at a time."""
    return (slice(start, min(start + PIECE, length)) for start in range(0, length, PIECE))
