"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): what a team would have without a trained draft.

This is a run of its own, not a replay: the target decodes a small share of the prompts again, greedily, so its figures
are an offline estimate and are never pooled with a replay of served tokens.

Every step is one pass of the target over a tree of tokens that hangs on the last emitted one:

- the lookahead branch, a window of W columns by N - 1 rows, each row what the pass before made of the one above: a
  token sees the columns before its own in the oldest row, and the rows above it in its own column (the paper's figure
  2); a column and its new token are an N-gram, kept in a pool under its first token, the G latest for each;
- the verification branch, the pool's N-grams (G at most) that begin with the last emitted token: of the one that the
  target's own choices follow furthest, the matching part is accepted, and the target's next choice comes on top.

Where the paper leaves a choice, it is that of its authors' code (hao-ai-lab/LookaheadDecoding): the oldest row begins
as random tokens of the prompt, the window moves by one column a step, and ``prompt=1`` puts the N-grams of prompt and
output into the pool too. Unlike there, guesses from the prompt are tried before the window is full.

The output is the target's own greedy output, token for token, but for numeric noise: a pass over many tokens rounds
differently from a pass over one, which in a half precision can turn a near-tie of the two best logits. In float32 and
float64 no difference was seen.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers import DynamicCache

from driftwatch.errors import ModelError
from driftwatch.shadow.draft import Fingerprint
from driftwatch.shadow.ngram import modelless_fingerprint, parameters

KIND = "lookahead"
PREFILL = 8192
"""Prompt tokens in one pass."""
RANGES = {"window": (1, 256), "ngram": (2, 32), "guesses": (1, 256), "prompt": (0, 1)}


@dataclass(frozen=True)
class Lookahead:
    """Window size W, n-gram size N, guess-set size G, and whether prompt and output fill the pool as well."""

    window: int
    ngram: int
    guesses: int
    prompt: bool = False

    @property
    def fingerprint(self) -> Fingerprint:
        values = {"window": self.window, "ngram": self.ngram, "guesses": self.guesses, "prompt": int(self.prompt)}
        return modelless_fingerprint(KIND, values)


def parse(spec: str) -> Lookahead:
    """``lookahead:window=5,ngram=3,guesses=5[,prompt=1]``. Raises ModelError with one line that names key and value."""
    found = parameters(spec, KIND, RANGES, {"prompt": 0})
    return Lookahead(found["window"], found["ngram"], found["guesses"], bool(found["prompt"]))


@dataclass(frozen=True)
class LookaheadResult:
    """One prompt decoded: the output's first token is from prefill and of no step."""

    output: list[int]
    accepted_per_step: list[int]
    """Guessed tokens that were emitted; each step emits one more, the target's own, unless the output ended before."""
    fed_per_step: list[int]
    """Tokens in the step's forward pass; plain decoding feeds one."""

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
    _require_masks(target)
    stops = frozenset(_end_of_text(target) if stop is None else stop)
    return [_decode(_Session(target, list(p), max_tokens), list(p), settings, max_tokens, stops, seed) for p in prompts]


def _decode(
    session: _Session, prompt: list[int], settings: Lookahead, max_tokens: int, stops: frozenset[int], seed: int
) -> LookaheadResult:
    window = _Window(settings, prompt, seed)
    pool = _Pool(settings)
    result = LookaheadResult([session.first], [], [])
    if settings.prompt:
        pool.add_all([*prompt, session.first])
    while len(result.output) < max_tokens and result.output[-1] not in stops:
        emitted, chosen, fed = _step(session, window, pool, result.output[-1])
        ends = [i for i, token in enumerate(emitted, 1) if token in stops]
        kept = emitted[: min([max_tokens - len(result.output), *ends])]
        result.output.extend(kept)
        result.accepted_per_step.append(min(len(emitted) - 1, len(kept)))
        result.fed_per_step.append(fed)
        pool.add_each(window.advance(result.output[-len(kept) - 1], chosen))
        if settings.prompt:
            recent = [*prompt, *result.output]
            pool.add_all(recent[-len(kept) - settings.ngram + 1 :])
    return result


def _step(session: _Session, window: _Window, pool: _Pool, last: int) -> tuple[list[int], list[int], int]:
    """One pass: tokens emitted, the window's new row, tokens fed."""
    tree = _Tree(last)
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
    return [choices[node] for node in best], [choices[node] for node in heads], len(tree.tokens)


def _accepted(tree: _Tree, path: list[int], choices: list[int]) -> int:
    """How many tokens of a path, behind the last emitted one, are what the target itself chose before them."""
    matches = (tree.tokens[node] == choices[before] for before, node in pairwise(path))
    return next((i for i, match in enumerate(matches) if not match), len(path) - 1)


class _Tree:
    """The tokens of a pass: each sees its ancestors and itself, and stands as many places on as it has ancestors."""

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self._parents = [-1]

    def add(self, token: int, parent: int) -> int:
        self.tokens.append(token)
        self._parents.append(parent)
        return len(self.tokens) - 1

    def chain(self, tokens: Iterable[int]) -> list[int]:
        """A branch of its own from the root, as the path to its end."""
        path = [0]
        for token in tokens:
            path.append(self.add(token, path[-1]))
        return path

    def visible(self) -> torch.Tensor:
        seen = torch.eye(len(self.tokens), dtype=torch.bool)
        for node, parent in enumerate(self._parents[1:], 1):
            seen[node] |= seen[parent]
        return seen


class _Window:
    """The lookahead branch. Row r, column j stands r + j places after the last emitted token, itself row 0's first."""

    def __init__(self, settings: Lookahead, prompt: list[int], seed: int) -> None:
        pick = random.Random(seed)
        self._height = settings.ngram - 1
        # Every row that is added until the window is full costs the ones above it a column.
        self.rows = [[pick.choice(prompt) for _ in range(settings.window + settings.ngram - 3)]]

    def advance(self, last: int, chosen: list[int]) -> list[tuple[int, ...]]:
        """Take the new row in and move on by a column; the n-grams that the pass completed."""
        if len(self.rows) < self._height:
            self.rows = [row[1:] for row in (*self.rows, chosen)]
            return []
        found = list(zip([last, *self.rows[0]], *self.rows[1:], chosen, strict=True))
        self.rows = [*self.rows[1:], chosen]
        self.rows[0] = self.rows[0][1:]
        return found


class _Pool:
    """N-grams by their first token: of each the latest, one of every kind."""

    def __init__(self, settings: Lookahead) -> None:
        self._size = settings.ngram
        self._limit = settings.guesses
        self._tails: dict[int, dict[tuple[int, ...], None]] = {}

    def add_each(self, ngrams: Iterable[Sequence[int]]) -> None:
        for first, *tail in ngrams:
            kept = self._tails.setdefault(first, {})
            kept.pop(tuple(tail), None)
            kept[tuple(tail)] = None
            if len(kept) > self._limit:
                del kept[next(iter(kept))]

    def add_all(self, tokens: list[int]) -> None:
        self.add_each(tokens[i : i + self._size] for i in range(len(tokens) - self._size + 1))

    def guesses(self, token: int) -> list[tuple[int, ...]]:
        return list(self._tails.get(token, ()))


class _Session:
    """The target on one prompt: its cache holds what was emitted, the last token aside."""

    def __init__(self, target: Any, prompt: list[int], max_tokens: int) -> None:
        config = target.config.get_text_config()
        self._limit = int(getattr(config, "max_position_embeddings", None) or 2**31)
        if not prompt or len(prompt) + max_tokens > self._limit:
            raise ModelError(
                f"target {target.name_or_path}: {len(prompt)} prompt and {max_tokens} output tokens do not fit into 1 "
                f"to {self._limit}; set fewer output tokens or leave the sample out"
            )
        self._target = target
        named = inspect.signature(target.forward).parameters
        self._keyword = "cache" if "cache" in named else "past_key_values"  # transformers 5 renames it
        self._windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
        self._cache: Any = DynamicCache()  # plain layers, also where attention slides: branches are taken out again
        self._cached = len(prompt)
        for part in torch.split(torch.tensor([prompt], device=target.device), PREFILL, dim=1):
            self.first = int(self._logits(input_ids=part, logits_to_keep=1)[-1].argmax())

    def choose(self, tree: _Tree) -> list[int]:
        """The target's first choice after each token of the tree."""
        seen = tree.visible()
        places = self._cached + seen.sum(dim=1) - 1
        logits = self._logits(
            input_ids=torch.tensor([tree.tokens], device=self._target.device),
            attention_mask=self._mask(seen, places),
            # A guess past the target's last position can only be emitted behind the output's end, where it is cut.
            position_ids=places.clamp(max=self._limit - 1)[None].to(self._target.device),
        )
        chosen: list[int] = logits.argmax(dim=-1).tolist()
        return chosen

    def keep(self, path: list[int]) -> None:
        """Leave the tokens of a path in the cache, drop the rest of the tree."""
        kept = torch.cat([torch.arange(self._cached), self._cached + torch.tensor(path)])
        for layer in self._cache.layers:
            layer.keys = layer.keys[:, :, kept.to(layer.keys.device)]
            layer.values = layer.values[:, :, kept.to(layer.values.device)]
        self._cached += len(path)

    def _logits(self, **inputs: Any) -> Any:
        return self._target(**inputs, **{self._keyword: self._cache}, use_cache=True).logits[0]

    def _mask(self, seen: torch.Tensor, places: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """What a token may see, to be added to the scores; by kind of layer where only some of them slide."""
        visible = torch.cat([torch.ones(len(seen), self._cached, dtype=torch.bool), seen], dim=1)
        distance = places[:, None] - torch.cat([torch.arange(self._cached), places])

        def added(window: int | None) -> torch.Tensor:
            hidden = ~visible if window is None else ~visible | (distance >= window)
            mask = torch.zeros(hidden.shape, dtype=self._target.dtype)
            return mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)[None, None].to(self._target.device)

        kinds = set(self._windows)
        if len(kinds) == 1:
            return added(*kinds)
        return {"sliding_attention" if window else "full_attention": added(window) for window in kinds}


def _require_masks(target: Any) -> None:
    """Raises ModelError for attention that takes no mask of its own, or a state that no branch can be taken out of."""
    attention = target.config._attn_implementation
    if attention not in ("eager", "sdpa"):
        raise ModelError(
            f"target {target.name_or_path}: lookahead decoding needs sdpa or eager attention, not {attention}"
        )
    for kind in getattr(target.config.get_text_config(), "layer_types", None) or []:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(f"target {target.name_or_path}: lookahead decoding cannot take back a step of {kind}")


def _end_of_text(target: Any) -> list[int]:
    found = target.generation_config.eos_token_id
    return [] if found is None else list(found) if isinstance(found, (list, tuple)) else [found]
