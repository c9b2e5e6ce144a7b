"""The semantic view: how far a prompt's mean token embedding lies from the centres of the training prompts.

Embeddings are static: rows of the model's own input table, so that no forward pass is needed. A rare token weighs more
than a frequent one, a / (a + p(token)) with a = 0.001, and the mean over all prompts is taken out (Arora, Liang and
Ma, ICLR 2017; the mean in place of their first singular vector). Prompt vectors are then whitened, which found code
among chat prompts (and the other way round) clearly better than cosine alone, and compared by cosine with centroids
from spherical k-means (Dhillon and Modha 2001).

The table is kept as a random projection in int8: on the same prompts that lost less than principal components did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from driftwatch.drift.sketch.grams import Ids, Mask, Texts, batches

Floats = NDArray[np.float32]

TABLE_BYTES = 4 << 20
LEAST_DIMENSIONS, MOST_DIMENSIONS = 16, 64
CENTROIDS = 128
PROMPTS_PER_CENTROID = 8
ROUNDS = 20
RARE = 1e-3
SEED = 0


@dataclass(frozen=True)
class Meaning:
    """Everything that scoring a prompt needs."""

    table: NDArray[np.int8]
    """[vocabulary, dimensions]"""
    scale: NDArray[np.float16]
    """[vocabulary]: what a row of the table is to be multiplied by."""
    weight: NDArray[np.float16]
    """[vocabulary]"""
    mean: Floats
    """[dimensions]: of the training prompts."""
    whitening: Floats
    """[dimensions, dimensions]"""
    centroids: Floats
    """[centroids, dimensions], each of length 1."""

    @classmethod
    def of(cls, embedding: Floats, prompts: Sequence[Ids]) -> Meaning:
        """Learn from an input embedding [vocabulary, hidden] and the content of training prompts, none empty."""
        table, scale = _projected(embedding)
        vocabulary, dimensions = table.shape
        tokens = np.concatenate(prompts)
        counts = np.bincount(tokens[tokens < vocabulary], minlength=vocabulary)
        weight = (RARE / (RARE + counts / max(counts.sum(), 1))).astype(np.float16)
        blank = cls(table, scale, weight, _zeros(dimensions), np.eye(dimensions, dtype=np.float32), _zeros(0, 0))
        vectors = np.concatenate([blank.vectors(texts, texts.all) for texts in batches(prompts)])
        mean = vectors.mean(axis=0)
        whitening = _whitening(vectors - mean)
        number = min(CENTROIDS, max(len(prompts) // PROMPTS_PER_CENTROID, 1))
        centroids = _centroids(_directions((vectors - mean) @ whitening), number)
        return cls(table, scale, weight, mean, whitening, centroids)

    def vectors(self, texts: Texts, content: Mask) -> Floats:
        """Weighted mean of the embeddings of each text's ``content`` [texts, dimensions]; zero where no token of it is
        in the vocabulary."""
        known = content & (texts.ids < len(self.table))
        ids, owner = texts.ids[known], texts.owner[known]
        found = _zeros(texts.count, self.table.shape[1])
        weights = self.weight[ids].astype(np.float32)
        factors = weights * self.scale[ids]
        ends = np.bincount(owner, minlength=texts.count).cumsum().tolist()
        for text, (start, end) in enumerate(pairwise([0, *ends])):
            if end > start:  # a product a text is ten times faster than summing all of their rows
                rows = self.table[ids[start:end]].astype(np.float32)
                found[text] = factors[start:end] @ rows / weights[start:end].sum()
        return found

    def distances(self, texts: Texts, content: Mask) -> NDArray[np.float64]:
        """1 - cosine to the nearest centroid [texts], in [0, 2]."""
        moved = np.asarray((self.vectors(texts, content) - self.mean) @ self.whitening, np.float32)
        directions = _directions(moved)
        return np.asarray(1.0 - (directions @ self.centroids.T).max(axis=1), np.float64)


def _projected(embedding: Floats) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    vocabulary, hidden = embedding.shape
    dimensions = min(max(TABLE_BYTES // vocabulary, LEAST_DIMENSIONS), MOST_DIMENSIONS, hidden)
    # Unit variance first: the scale of a model's table says nothing, and float16 could not hold every one.
    centred = (embedding - embedding.mean(axis=0)) / max(float(embedding.std()), 1e-12)
    directions = np.random.default_rng(SEED).normal(size=(hidden, dimensions)) / np.sqrt(hidden)
    rows = centred @ directions.astype(np.float32)
    scale = (np.maximum(np.abs(rows).max(axis=1), 1e-3) / 127.0).astype(np.float16)
    return np.clip(np.rint(rows / scale.astype(np.float32)[:, None]), -127, 127).astype(np.int8), scale


def _whitening(vectors: Floats) -> Floats:
    """A linear map to unit variance, shrunk half-way to the mean variance, so that no direction is blown up."""
    variances, directions = np.linalg.eigh(vectors.T @ vectors / len(vectors))
    shrunk = np.maximum(variances, 0.0) + max(float(variances.mean()), 1e-12)
    return np.asarray(directions / np.sqrt(shrunk), np.float32)


def _centroids(directions: Floats, number: int) -> Floats:
    generator = np.random.default_rng(SEED)
    centres = directions[generator.choice(len(directions), number, replace=False)]
    for _ in range(ROUNDS):
        nearest = (directions @ centres.T).argmax(axis=1)
        sums = np.zeros_like(centres)
        np.add.at(sums, nearest, directions)
        empty = ~sums.any(axis=1)
        sums[empty] = centres[empty]
        centres = _directions(sums)
    return centres


def _directions(vectors: Floats) -> Floats:
    """Each of length 1, the zero vector left as it is."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(lengths > 0.0, lengths, 1.0), np.float32)


def _zeros(*shape: int) -> Floats:
    return np.zeros(shape, np.float32)
