"""What an EAGLE-3 head needs of its target, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from driftwatch.shadow.packing import Packed

Reduce = Callable[[list[torch.Tensor]], torch.Tensor]
"""Layers in the order asked for, [batch, piece, Ht] each, to what is kept of them, [batch, piece, H]."""


@dataclass(frozen=True)
class Read:
    """One pass of the target over a batch."""

    states: torch.Tensor
    """[batch, width, H]: the reduced layers at every position; what is behind a sample's last position is undefined."""
    final: torch.Tensor | None
    """[N, Ht]: the last hidden states of the judged rows, after the final norm, where they were asked for."""


class States(Protocol):
    """A target seen from its draft."""

    @property
    def draft_device(self) -> torch.device:
        """Where the head is to run."""

    @property
    def dtype(self) -> torch.dtype:
        """Type that the head is to compute in."""

    @property
    def hidden(self) -> int:
        """Width of a layer's output, Ht."""

    @property
    def layers(self) -> int:
        """Decoder layers of the target."""

    @property
    def gives(self) -> Sequence[int]:
        """Layers that it gives, as indices into Hugging Face's ``hidden_states``."""

    @property
    def token_ids(self) -> int:
        """How many token ids it knows."""

    @property
    def positions(self) -> int | None:
        """The most tokens that it can be fed, where it has a learnt table of positions."""

    @property
    def embedding(self) -> torch.Tensor:
        """[token ids, width], as stored; for a head that brings none of its own."""

    @property
    def head_weight(self) -> torch.Tensor:
        """[token ids, Ht] of the output head; for a head that brings none of its own."""

    def read(self, packed: Packed, layers: Sequence[int], reduce: Reduce, *, final: bool) -> Read:
        """The layers of every position, and with ``final`` the last hidden states of the judged rows. Raises
        ModelError if they cannot be had, torch's out-of-memory error as it comes."""
