"""What hangs on the last emitted token: the window that makes n-grams, the pool that keeps them, the tree they form."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch

from driftwatch.shadow.lookahead.method import Lookahead


class Tree:
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


class Window:
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


class Pool:
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
