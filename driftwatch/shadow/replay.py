"""Replaying many samples: batches under a token budget, smaller ones when memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from driftwatch.acceptance import Weights
from driftwatch.shadow.agreement import Agreement
from driftwatch.shadow.device import is_out_of_memory
from driftwatch.shadow.draft import Comparing, Draft, Tokens
from driftwatch.shadow.states.engine import NotGivenError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """What came of one sample: its weights, or the reason there are none."""

    index: int
    weights: Weights | None
    skipped: str | None = None
    agreement: Agreement | None = None


Turn = Callable[[], AbstractContextManager[None]]
"""What a batch is computed in: it may wait before, and sees the batch's errors."""


def replay(draft: Draft, samples: Sequence[Tokens], *, batch_tokens: int, turn: Turn = nullcontext) -> Iterator[Result]:
    """Replay samples in any order that suits the hardware; exactly one result for each, carrying its index.

    Raises ModelError if the engine that gives hidden states is away: the results so far stand, the others may be asked
    for again.
    """
    fitting = []
    for index, tokens in enumerate(samples):
        if reason := draft.skip_reason(tokens):
            yield Result(index, None, reason)
        else:
            fitting.append(index)
    for batch in batches(fitting, [tokens.length for tokens in samples], batch_tokens):
        yield from _judge(draft, samples, batch, turn)


def batches(indices: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Group samples of like length: a batch's padded size stays within the budget, a longer sample goes alone."""
    batch: list[int] = []
    for index in sorted(indices, key=lambda i: lengths[i]):
        if batch and lengths[index] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _judge(draft: Draft, samples: Sequence[Tokens], batch: list[int], turn: Turn) -> Iterator[Result]:
    reason = ""
    try:
        with turn():
            found = _measured(draft, [samples[index] for index in batch])
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        found, reason = None, "out_of_memory"
    except NotGivenError as error:
        log.warning("%s", error)
        found, reason = None, "no_hidden_states"
    if found is not None:
        for index, (weights, agreement) in zip(batch, found, strict=True):
            yield Result(index, weights, agreement=agreement)
    elif len(batch) == 1:
        log.warning("%s: a sample of %d tokens is skipped", reason, samples[batch[0]].length)
        yield Result(batch[0], None, reason)
    else:
        half = len(batch) // 2
        log.warning("%s: a batch of %d samples is halved", reason, len(batch))
        yield from _judge(draft, samples, batch[:half], turn)
        yield from _judge(draft, samples, batch[half:], turn)


def _measured(draft: Draft, batch: Sequence[Tokens]) -> Sequence[tuple[Weights, Agreement | None]]:
    if isinstance(draft, Comparing):
        return draft.measure(batch)
    return [(weights, None) for weights in draft.replay(batch)]
