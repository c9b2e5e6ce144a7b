"""The decoding loop, on prompts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from driftwatch.shadow.lookahead.branches import Pool, Tree, Window
from driftwatch.shadow.lookahead.method import Lookahead
from driftwatch.shadow.lookahead.session import Session, require_masks


@dataclass(frozen=True)
class LookaheadResult:
    """One prompt decoded: the output's first token is from prefill and of no step."""

    output: list[int]
    accepted_per_step: list[int]
    """Guessed tokens that were emitted; each step emits one more, the target's own, unless the output ended before."""
    fed_per_step: list[int]
    """Tokens in the step's forward pass; plain decoding feeds one."""
    guesses_per_step: list[int]
    """N-grams that were tried; where there is none, the step proposes nothing."""

    @property
    def steps(self) -> int:
        return len(self.accepted_per_step)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_step)

    @property
    def fed(self) -> int:
        """The cost: tokens through the target after prefill."""
        return sum(self.fed_per_step)

    @property
    def compression(self) -> float | None:
        """Tokens a step, 1 for plain decoding; None without a step. Over many results sum tokens and steps first."""
        return (len(self.output) - 1) / self.steps if self.steps else None


@torch.inference_mode()
def run(
    target: Any,
    prompts: Iterable[Sequence[int]],
    settings: Lookahead,
    *,
    max_tokens: int,
    stop: Collection[int] | None = None,
    seed: int = 0,
) -> list[LookaheadResult]:
    """Decode each prompt greedily with a causal language model that is loaded and in eval mode.

    An output ends after ``max_tokens``, at the target's own end of text, or at one of ``stop`` where given (empty:
    never). A result depends on its own prompt alone. Raises ModelError if the target cannot attend as a tree needs, or
    if a prompt is empty or leaves no room for the output.
    """
    require_masks(target)
    stops = frozenset(_end_of_text(target) if stop is None else stop)
    return [_decode(Session(target, list(p), max_tokens), list(p), settings, max_tokens, stops, seed) for p in prompts]


def _decode(
    session: Session, prompt: list[int], settings: Lookahead, max_tokens: int, stops: frozenset[int], seed: int
) -> LookaheadResult:
    window = Window(settings, prompt, seed)
    pool = Pool(settings)
    result = LookaheadResult([session.first], [], [], [])
    if settings.prompt:
        pool.add_all([*prompt, session.first])
    while len(result.output) < max_tokens and result.output[-1] not in stops:
        emitted, chosen, fed, guesses = _step(session, window, pool, result.output[-1])
        ends = [i for i, token in enumerate(emitted, 1) if token in stops]
        kept = emitted[: min([max_tokens - len(result.output), *ends])]
        result.output.extend(kept)
        result.accepted_per_step.append(min(len(emitted) - 1, len(kept)))
        result.fed_per_step.append(fed)
        result.guesses_per_step.append(guesses)
        pool.add_each(window.advance(result.output[-len(kept) - 1], chosen))
        if settings.prompt:
            recent = [*prompt, *result.output]
            pool.add_all(recent[-len(kept) - settings.ngram + 1 :])
    return result


class _Step(NamedTuple):
    emitted: list[int]
    row: list[int]
    """The window's new one."""
    fed: int
    guesses: int


def _step(session: Session, window: Window, pool: Pool, last: int) -> _Step:
    """One pass of the target over both branches."""
    tree = Tree(last)
    heads = [0]  # the oldest row's first column is the last emitted token itself
    for token in window.rows[0]:
        heads.append(tree.add(token, heads[-1]))
    for row in window.rows[1:]:
        heads = [tree.add(token, above) for token, above in zip(row, heads, strict=True)]
    paths = [tree.chain(guess) for guess in pool.guesses(last)]
    choices = session.choose(tree)
    best = [0]
    for path in paths:
        accepted = _accepted(tree, path, choices)
        best = max(best, path[: accepted + 1], key=len)
    session.keep(best)
    row = [choices[node] for node in heads]
    return _Step([choices[node] for node in best], row, len(tree.tokens), len(paths))


def _accepted(tree: Tree, path: list[int], choices: list[int]) -> int:
    """How many tokens of a path, behind the last emitted one, are what the target itself chose before them."""
    matches = (tree.tokens[node] == choices[before] for before, node in pairwise(path))
    return next((i for i, match in enumerate(matches) if not match), len(path) - 1)


def _end_of_text(target: Any) -> list[int]:
    found = target.generation_config.eos_token_id
    return [] if found is None else list(found) if isinstance(found, (list, tuple)) else [found]
