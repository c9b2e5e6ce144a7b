"""Draft trees as SGLang grows them from an EAGLE-3 head (``--speculative-eagle-topk`` above 1).

Of the root, the last verified token, the ``topk`` likeliest next tokens are candidates. At each further step the head
is fed a beam of ``topk`` candidates of the level before and gives ``topk`` children of each; a candidate's score is
the product of the draft's probabilities on its path, and the likeliest ``topk`` of a level are the next beam, whether
or not they end up in the tree. When ``steps`` levels are grown, the likeliest ``tokens`` - 1 candidates of all levels
are kept: with the root, what the target verifies. (SGLang 0.5.23: ``select_top_k_tokens`` in
``speculative/spec_utils.py``, ``organize_draft_results`` in ``speculative/eagle_utils.py``.) A child is never likelier
than its parent and comes behind it, so with ties to the first candidate the kept ones are a tree; the engine leaves
ties to its top-k kernel.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from driftwatch.economics.shape import split_draft
from driftwatch.errors import ModelError
from driftwatch.shadow.ngram import parameters

RANGES = {"steps": (1, 32), "topk": (1, 32), "tokens": (2, 1024)}
"""What a draft's name may ask for."""


@dataclass(frozen=True)
class Tree:
    """The three numbers that make a tree: SGLang's ``--speculative-num-steps``, ``--speculative-eagle-topk`` and
    ``--speculative-num-draft-tokens``. For Llama targets its defaults are 5, 4 and 8."""

    steps: int
    topk: int
    tokens: int

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that make no tree."""
        if min(self.steps, self.topk) < 1:
            raise ValueError("`steps` and `topk` are at least 1")
        if not 2 <= self.tokens <= self.candidates + 1:
            raise ValueError(
                f"`tokens` is {self.tokens}, but the root and {self.steps} steps of topk {self.topk} are 2 to "
                f"{self.candidates + 1} tokens"
            )
        if self.topk == 1 and self.tokens != self.steps + 1:
            raise ValueError(f"topk 1 is a chain, for which SGLang takes tokens = steps + 1 = {self.steps + 1}")

    @property
    def candidates(self) -> int:
        return self.topk + (self.steps - 1) * self.topk**2

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in asdict(self).items())


def split_spec(spec: str | Path) -> tuple[str, Tree | None]:
    """A head's folder, and its tree where one is asked for: ``path/to/head:steps=5,topk=4,tokens=8``.

    Raises ModelError with one line that names what is wrong with the tree.
    """
    folder, body = split_draft(str(spec))
    if not body or Path(spec).exists():
        return str(spec), None
    if not Path(folder).exists():
        raise ModelError(f"draft {spec}: no such folder ({folder}), and no draft of that name")
    found = parameters(str(spec), folder, RANGES)
    try:
        return folder, Tree(**found)
    except ValueError as error:
        raise ModelError(f"draft {spec}: {error}") from None


def tree_sha256(weights: str, tree: Tree) -> str:
    """The fingerprint of a head, by that of its weights, that drafts this tree: another than the head's as a chain."""
    return hashlib.sha256(f"{weights}:{tree}".encode()).hexdigest()


class Growth:
    """Trees that grow side by side, one a row, each watched along the path of the tokens that were served.

    Scores are float32 products, as the engine's are.
    """

    def __init__(self, tree: Tree, rows: int, device: torch.device) -> None:
        self._tree = tree
        self._scores = torch.full((rows, tree.candidates), -1.0, device=device)
        self._path = torch.full((rows, tree.steps), -1, dtype=torch.long, device=device)
        """Candidate that is the served token of each depth, below the one of the depth before; -1 where none is."""
        self._filled = self._depth = 0
        self._beam = torch.zeros(rows, 1, dtype=torch.long, device=device)
        """[rows, beam]: candidates that the head was fed last, the root at first."""
        self._beam_scores = torch.ones(rows, 1, device=device)

    def grow(
        self, probabilities: torch.Tensor, tokens: torch.Tensor, served: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One level more: [rows, beam, topk] probabilities and target ids of the children of the beam, best first.

        ``served`` [rows] is the token served at this depth, -1 behind the output's end. Returns the next beam, [rows,
        topk] each: its tokens, and which of the present beam's members its members descend from.
        """
        before, first = self._last(), self._filled
        scores = (self._beam_scores[:, :, None] * probabilities).flatten(1)
        hit = ((self._beam == before[:, None])[:, :, None] & (tokens == served[:, None, None])).flatten(1)
        self._path[:, self._depth] = torch.where(hit.any(1), first + hit.int().argmax(1), -1)
        self._scores[:, first : first + scores.shape[1]] = scores
        self._filled += scores.shape[1]
        self._depth += 1
        ranked = scores.sort(dim=1, descending=True, stable=True)
        best = ranked.indices[:, : self._tree.topk]
        self._beam, self._beam_scores = first + best, ranked.values[:, : self._tree.topk]
        return tokens.flatten(1).gather(1, best), best // self._tree.topk

    def settled(self) -> torch.Tensor:
        """[rows]: trees whose further levels change nothing: no served token comes further down, and no descendant of
        the beam can be likelier than the last one that did."""
        depth = self._path[:, : self._depth]
        last = torch.where(depth >= 0, self._scores.gather(1, depth.clamp(min=0)), torch.inf).amin(1)
        return (self._path[:, self._depth - 1] < 0) & (last >= self._beam_scores[:, 0])

    def accepted(self) -> torch.Tensor:
        """[rows]: served tokens that the tree holds, one below the other from the root on."""
        index = torch.arange(self._scores.shape[1], device=self._scores.device)
        found = torch.zeros_like(self._path[:, 0])
        for depth in range(self._depth):
            at = self._path[:, depth, None]
            score = self._scores.gather(1, at.clamp(min=0))
            ahead = (self._scores > score) | ((self._scores == score) & (index < at))
            found += (at[:, 0] >= 0) & (ahead.sum(1) < self._tree.tokens - 1)
        return found

    def take(self, rows: torch.Tensor) -> None:
        """Go on with some of the rows."""
        self._scores, self._path = self._scores[rows], self._path[rows]
        self._beam, self._beam_scores = self._beam[rows], self._beam_scores[rows]

    def _last(self) -> torch.Tensor:
        """[rows]: the candidate reached so far; the root, named 0 like its beam, at first."""
        if self._depth == 0:
            return self._beam[:, 0]
        return self._path[:, self._depth - 1]
