"""Does a draft work on this target at all, and would another reading of its checkpoint work better?

A wrong layer id or norm flag raises no error anywhere: acceptance is just lower, in the engine as here. So a head is
tried on text that the target itself wrote, as loaded and under each mistake that is known, row by row on the same text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from driftwatch.shadow.block import readings as block
from driftwatch.shadow.block.replay import BlockDraft
from driftwatch.shadow.draft import Draft, Tokens
from driftwatch.shadow.eagle3.readings import other_readings
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.eagle3.rollout import Eagle3TreeDraft
from driftwatch.shadow.replay import replay
from driftwatch.shadow.target import Target
from driftwatch.shadow.tokenizer import Retokeniser

PROMPTS = (
    "def read_lines(path):\n    with open(path) as file:\n        return",
    "import os\nimport sys\n\nclass Reader:\n    def __init__(self, path):\n        self",
    "for key, value in sorted(values.items()):\n    if value is None:\n        ",
    "    def close(self):\n        if self._file is not None:\n            self._file",
    "try:\n    import json\nexcept ImportError:\n    json = None\n\ndef parse(text):\n",
    "# Return the number of items that were added since the last call.\nif not",
    "The most important thing to understand about memory is that every value has",
    "In this chapter we will look at how a program can be split into parts, and why",
    "Once upon a time there was an old man who lived by the sea. Every morning he",
    "The answer to the question is that water boils when it reaches a temperature of",
    "A list of three reasons why people like to travel to other countries: first, they",
    "Dear Sir or Madam, I am writing to you about the letter that I received on Monday,",
)
"""Beginnings of code and of prose: a target of either kind writes something of its own after some of them."""

OUTPUT_TOKENS = 48
DEPTHS = 4
PIECE = 12
"""Judged tokens that are scored as one."""
BETTER = 4.0
"""Standard errors by which another reading must fit better to be named."""


@dataclass(frozen=True)
class Reading:
    """Another reading of a draft, and what is wrong if it is the one that fits."""

    name: str
    cause: str
    draft: Draft


@dataclass(frozen=True)
class Fit:
    """How a draft, as loaded, did on the sample text."""

    tokens: int
    hits: float
    """Share of judged tokens that are its first choice, at depth 0."""
    chance: float
    """Share of the commonest judged token: what proposing one token always would reach."""
    better: tuple[Reading, float, float, float] | None = None
    """The best other reading if it fits better: its score, the score as loaded, and standard errors between them."""

    @property
    def works(self) -> bool:
        return self.hits > self.chance + 2 * float(np.sqrt(self.chance * (1 - self.chance) / max(1, self.tokens)))


def own_text(target: Target, tokenizer: Retokeniser | None) -> list[Tokens]:
    """Greedy continuations of short prompts by the target itself; of random ids where there is no tokenizer."""
    model = target.model()
    if tokenizer is not None:
        encoded = [tokenizer.encode(prompt) for prompt in PROMPTS]
    else:
        draws = torch.Generator().manual_seed(0)
        encoded = torch.randint(len(model.embedding), (len(PROMPTS), 8), generator=draws).tolist()
    width = min(len(ids) for ids in encoded)
    prompts = torch.tensor([ids[-width:] for ids in encoded], device=model.device)
    with torch.inference_mode():
        written = model.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=OUTPUT_TOKENS,
            min_new_tokens=OUTPUT_TOKENS,
            pad_token_id=0,
        )
    return [Tokens(row[:width], row[width:], temperature=0.0) for row in written.tolist()]


def self_test(draft: Draft, target: Target, samples: Sequence[Tokens], *, batch_tokens: int) -> Fit:
    """Try a draft, opened under the argmax rule, on samples of the target's; an EAGLE-3 head under other readings too,
    where the target is at hand, since its probabilities tell them apart."""
    if isinstance(draft, Eagle3TreeDraft):  # a tree is known at the starts of one walk only; the head is to be tried
        draft = Eagle3Draft(draft.checkpoint, target, depths=1)
    kept = [one for one in samples if draft.skip_reason(one) is None]
    served = Counter(token for one in kept for token in one.output[1:])
    hits = np.concatenate([values[:, 0] for values in _weights(draft, kept, batch_tokens)]) if kept else np.zeros(0)
    chance = max(served.values(), default=0) / max(1, len(hits))
    fit = Fit(len(hits), float(hits.mean()) if len(hits) else 0.0, chance)
    if not isinstance(draft, (Eagle3Draft, BlockDraft)) or target.engine is not None or not kept:
        return fit
    return replace(fit, better=_better(draft, target, kept, batch_tokens))


def _loaded(draft: Eagle3Draft | BlockDraft, target: Target) -> Draft:
    if isinstance(draft, Eagle3Draft):
        return Eagle3Draft(draft.checkpoint, target, depths=DEPTHS, agreement=True)
    return BlockDraft(draft.spec, draft.checkpoint, target, depths=DEPTHS, agreement=True)


def _readings(draft: Eagle3Draft | BlockDraft, target: Target) -> Iterator[Reading]:
    if isinstance(draft, Eagle3Draft):
        for one in other_readings(draft.checkpoint, target.model()):
            tried = Eagle3Draft(one.checkpoint, target, depths=DEPTHS, agreement=True)
            yield Reading(one.name, one.cause, tried)
        return
    for other in block.other_readings(draft, target.model()):
        reread = BlockDraft(other.spec, draft.checkpoint, target, depths=DEPTHS, agreement=True)
        yield Reading(other.name, other.cause, reread)


def _better(
    draft: Eagle3Draft | BlockDraft, target: Target, samples: Sequence[Tokens], batch_tokens: int
) -> tuple[Reading, float, float, float] | None:
    """Scores are mean sum min(p, q) over starts and depths, far finer than hits, compared piece of text by piece."""
    pieces = [piece for one in samples for piece in _pieces(one)]
    loaded = _scores(_loaded(draft, target), pieces, batch_tokens)
    found = []
    for reading in _readings(draft, target):
        scores = _scores(reading.draft, pieces, batch_tokens)
        gain = scores - loaded
        error = float(gain.std(ddof=1) / np.sqrt(len(gain))) if len(gain) > 1 else float("inf")
        if gain.mean() > BETTER * error > 0:
            found.append((reading, float(scores.mean()), float(loaded.mean()), float(gain.mean() / error)))
    return max(found, key=lambda one: one[1], default=None)


def _pieces(sample: Tokens) -> Iterator[Tokens]:
    """Stretches of an output, each judged after all that came before it."""
    for start in range(0, sample.judged, PIECE):
        output = sample.output[start : start + PIECE + 1]
        if len(output) > DEPTHS:
            yield Tokens([*sample.prompt, *sample.output[:start]], output)


def _scores(tried: Draft, pieces: Sequence[Tokens], batch_tokens: int) -> NDArray[np.float64]:
    agreements = {result.index: result.agreement for result in replay(tried, pieces, batch_tokens=batch_tokens)}
    known = [found for i in range(len(pieces)) if (found := agreements[i]) is not None]
    return np.array([found.overlap.sum() / found.proposals.sum() for found in known])


def _weights(draft: Draft, samples: Sequence[Tokens], batch_tokens: int) -> list[NDArray[np.float64]]:
    results = {result.index: result.weights for result in replay(draft, samples, batch_tokens=batch_tokens)}
    return [weights.values for i in range(len(samples)) if (weights := results[i]) is not None]
