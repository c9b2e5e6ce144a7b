"""A batch of samples as tensors: padded ids for the models, and every judged token of the batch as one packed row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from driftwatch.shadow.draft import Tokens


@dataclass(frozen=True)
class Packed:
    """Row r stands for one judged token, sample by sample in order; N rows in all. Everything is on the CPU."""

    ids: torch.Tensor
    """[batch, width]: prompt and output without its last token, which is only predicted; zeros behind."""
    sample: torch.Tensor
    """[N]: the row's sample."""
    position: torch.Tensor
    """[N]: position in ``ids`` of the token before the judged one."""
    served: torch.Tensor
    """[N]: the judged token's id."""
    left: torch.Tensor
    """[N]: judged tokens of its sample from this one on, itself included: proposals of a window that starts here and
    still meet a served token."""
    bounds: tuple[int, ...]
    """[batch + 1]: rows of sample b are bounds[b] .. bounds[b + 1] - 1."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample in ``ids``."""
        return [int(self.position[stop - 1]) + 1 for stop in self.bounds[1:]]

    def gather(self, pieces: Iterable[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """The states at the rows' positions, [N, H], out of pieces [batch, piece, H] that begin at a position each."""
        found: torch.Tensor | None = None
        for start, states in pieces:
            inside = ((self.position >= start) & (self.position < start + states.shape[1])).nonzero()[:, 0]
            sample, position = self.sample[inside].to(states.device), self.position[inside].to(states.device)
            if found is None:
                found = states.new_empty(len(self.served), states.shape[-1])
            found[inside.to(states.device)] = states[sample, position - start]
        assert found is not None
        return found

    def split(self, values: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        """[N, ...] by sample."""
        return np.split(values, self.bounds[1:-1])


def pack(batch: Sequence[Tokens]) -> Packed:
    """Tensors of a batch; every sample has at least one judged token."""
    width = max(tokens.length for tokens in batch)
    ids = torch.zeros((len(batch), width), dtype=torch.long)
    counts = torch.tensor([tokens.judged for tokens in batch])
    starts = torch.tensor([len(tokens.prompt) for tokens in batch])
    served: list[int] = []
    for i, tokens in enumerate(batch):
        ids[i, : tokens.length] = torch.tensor([*tokens.prompt, *tokens.output[:-1]])
        served += tokens.output[1:]
    ends = counts.cumsum(0)
    index = torch.arange(int(ends[-1])) - (ends - counts).repeat_interleave(counts)
    return Packed(
        ids=ids,
        sample=torch.arange(len(batch)).repeat_interleave(counts),
        position=starts.repeat_interleave(counts) + index,
        served=torch.tensor(served),
        left=counts.repeat_interleave(counts) - index,
        bounds=(0, *ends.tolist()),
    )
