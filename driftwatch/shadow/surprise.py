"""How likely the target recorded here finds what was served: on a share of the samples, since it costs a prefill of it.

Per token the log-probability of what was served and the entropy of the whole distribution, at temperature 1. On tokens
that this very target sampled at temperature 1 the two cancel on average; one that was fine-tuned, quantised or swapped
in silence serves tokens that are less likely than that. At other temperatures they do not cancel, but what is left is
as steady as the settings are, so that a rise still shows.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from driftwatch.errors import ModelError
from driftwatch.shadow.causal import Causal
from driftwatch.shadow.device import free_bytes, is_out_of_memory
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.judge import TargetRows, rows_at_once
from driftwatch.shadow.packing import pack
from driftwatch.shadow.target import Target

log = logging.getLogger(__name__)

ONE_IN = 8
"""Share of the samples that are looked at. By a hash of their number, so that it goes along with nothing."""


@dataclass(frozen=True)
class Surprise:
    """Sums over the judged tokens of one sample, in nats."""

    tokens: int
    logprob: float
    entropy: float

    def as_dict(self) -> dict[str, float]:
        """As it is stored among a replay's figures."""
        return {"compared": self.tokens, "logprob": round(self.logprob, 4), "entropy": round(self.entropy, 4)}


def model_of(target: Target, device: torch.device) -> Causal | None:
    """The target's model where it is at hand, or can be loaded without taking half of the free memory; else None."""
    if target.engine is not None:
        return None
    if not target.loaded:
        weights = sum(file.stat().st_size for file in target.path.glob("*.safetensors"))
        free = free_bytes(device) or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if not 0 < weights < free / 2:
            log.info("target %s is not loaded for its surprise alone: %d bytes of weights", target.path, weights)
            return None
    try:
        return target.model()
    except ModelError as error:
        log.warning("no figures of the target's surprise: %s", error)
        return None


def is_chosen(sample_id: int) -> bool:
    return zlib.crc32(sample_id.to_bytes(8, "little")) % ONE_IN == 0


@torch.inference_mode()
def surprise(target: Causal, tokens: Tokens) -> Surprise | None:
    """Of one sample; None if it has nothing to judge, ids that the target does not have, or no room in memory."""
    if tokens.judged < 1 or not tokens.prompt or max(*tokens.prompt, *tokens.output) >= target.token_ids:
        return None
    try:
        logprob, entropy = zip(*_pieces(target, [tokens]), strict=True)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        log.warning("out of memory: the target does not judge a sample of %d tokens", tokens.length)
        return None
    return Surprise(tokens.judged, sum(logprob), sum(entropy))


def _pieces(target: Causal, batch: Sequence[Tokens]) -> Iterator[tuple[float, float]]:
    packed = pack(batch)
    passes = target.prefill(packed.ids.to(target.device))
    final = packed.gather((start, last) for start, _, last in passes if last is not None)
    served = packed.served.to(final.device)
    size = rows_at_once(target.vocabulary)
    for start in range(0, len(served), size):
        rows = slice(start, min(start + size, len(served)))
        said = TargetRows.of(target.logits(final[rows]), served[rows], None, full=True)
        logprob, entropy = said.surprise(served[rows])
        yield float(logprob.sum()), float(entropy.sum())
