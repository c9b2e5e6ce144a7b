"""Lookahead decoding on a share of recorded requests, in the words of acceptance.

What is judged is the target's own greedy answer to a record's prompt, as long as the recorded one at most, whatever
temperature that was served at. A step that tries an n-gram is a window of N - 1 proposals, one without is a plain step;
the proposal at depth d is accepted if an n-gram that holds what was emitted so far goes on as the target does.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from driftwatch.acceptance import Weights
from driftwatch.records import Record
from driftwatch.shadow.device import is_out_of_memory
from driftwatch.shadow.draft import Fingerprinted, Tokens
from driftwatch.shadow.figures import skip_reason
from driftwatch.shadow.history import Outcome, Summary, tokens_of
from driftwatch.shadow.lookahead.decoding import LookaheadResult, run
from driftwatch.shadow.lookahead.method import Lookahead
from driftwatch.shadow.target import Target
from driftwatch.shadow.tokenizer import Retokeniser


def choose(records: Iterable[Record], limit: int) -> tuple[list[Record], int]:
    """At most ``limit`` records in their order, and how many there were: those whose ids have the smallest hashes, so
    the same ones in every run, whatever else they hold."""
    seen = 0

    def numbered() -> Iterator[tuple[bytes, int, Record]]:
        nonlocal seen
        for seen, record in enumerate(records, 1):
            yield hashlib.blake2b(record.id.encode(), digest_size=16).digest(), seen, record

    chosen = heapq.nsmallest(limit, numbered(), key=lambda one: one[:2])
    return [record for _, _, record in sorted(chosen, key=lambda one: one[1])], seen


@dataclass(frozen=True)
class Decoded(Outcome):
    """One record whose prompt was decoded again. ``weights`` are those of the target's own output, for N - 1 proposals
    and no other number."""

    fed: int = 0
    """Tokens through the target after prefill, the cost: plain decoding feeds one a step."""


def decode_records(
    target: Target, records: Iterable[Record], settings: Lookahead, *, tokenizer: Retokeniser | None = None
) -> Iterator[Decoded]:
    """One outcome for each record, in order, decoded as it is asked for.

    Raises ModelError if the target cannot be loaded, or cannot attend as lookahead decoding needs.
    """
    for record in records:
        tokens = tokens_of(record, tokenizer)
        if isinstance(tokens, str):
            yield Decoded(record, None, tokens)
        elif reason := _unfit(target, tokens):
            yield Decoded(record, None, reason)
        else:
            yield _decode(target, record, tokens, settings)


def _decode(target: Target, record: Record, tokens: Tokens, settings: Lookahead) -> Decoded:
    try:
        (result,) = run(target.model().model, [tokens.prompt], settings, max_tokens=len(tokens.output))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return Decoded(record, None, "out_of_memory")
    if not result.steps:
        return Decoded(record, None, "too_short")
    return Decoded(record, weights_of(result, settings), None, retokenised=not record.has_ids, fed=result.fed)


def _unfit(target: Target, tokens: Tokens) -> str | None:
    model = target.model()
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and len(tokens.prompt) + len(tokens.output) > longest:
        return "too_long"
    return skip_reason(tokens, len(model.embedding), "argmax")


def weights_of(result: LookaheadResult, settings: Lookahead) -> Weights:
    """The walk that was made, as weights for N - 1 proposals: the starts that it did not visit hold nothing."""
    tokens = len(result.output) - 1
    values = np.zeros((tokens, settings.gamma))
    proposals = np.zeros(tokens, np.int64)
    start = 0
    for accepted, guesses in zip(result.accepted_per_step, result.guesses_per_step, strict=True):
        values[start, :accepted] = 1.0
        proposals[start] = settings.gamma if guesses else 0
        start += accepted + 1
    return Weights(values, proposals, walked=True)


@dataclass
class Tried(Summary):
    """Figures of the share so far, with what says that they are those of a run and no replay."""

    records: list[Record] = field(default_factory=list)
    """The share that is to be decoded."""
    seen: int = 0
    fed: int = 0

    @classmethod
    def on(cls, records: Iterable[Record], settings: Lookahead, by: Sequence[str] = ()) -> Tried:
        """Nothing yet, of the share that ``settings`` asks for."""
        chosen, seen = choose(records, settings.requests)
        return cls("argmax", settings.gamma, by, records=chosen, seen=seen)

    def add(self, outcome: Outcome) -> None:
        super().add(outcome)
        if isinstance(outcome, Decoded):
            self.fed += outcome.fed

    def as_dict(self, draft: Fingerprinted) -> dict[str, Any]:
        parts = (self.served.total, self.retokenised.total)
        steps = sum(float(part.sums.tally.steps[-1]) for part in parts)
        run = {
            "records": self.seen,
            "chosen": len(self.records),
            "decoding": "greedy",
            "fed": self.fed,
            "fed_per_step": self.fed / steps if steps else None,
        }
        return super().as_dict(draft) | {"run": run}
