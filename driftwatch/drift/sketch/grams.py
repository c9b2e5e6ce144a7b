"""The surface view: which n-grams of tokens the training data had, by hash."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Keys = NDArray[np.uint64]
Mask = NDArray[np.bool_]

ORDERS = 3
"""N-grams of one to three tokens."""
BITS_PER_GRAM = 10
LEAST_BITS, MOST_BITS = 1 << 16, 1 << 26
PROBES = 2
BATCH_TOKENS = 1 << 16
PRIOR = 3.0
"""Seen n-grams that every text is taken to have besides its own: little can be said of a handful of tokens."""

_FIRST, _SECOND, _STEP = (np.uint64(c) for c in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15))


@dataclass(frozen=True)
class Texts:
    """Several token sequences end to end: what numpy does once for many costs little for each."""

    ids: Ids
    """[tokens]"""
    owner: Ids
    """[tokens]: the index of the text that a token belongs to."""
    count: int

    @classmethod
    def of(cls, texts: Sequence[Sequence[int] | Ids]) -> Texts:
        arrays = [np.asarray(text, np.int64) for text in texts]
        lengths = [len(array) for array in arrays]
        return cls(np.concatenate(arrays), np.repeat(np.arange(len(arrays)), lengths), len(arrays))

    @property
    def all(self) -> Mask:
        """Every token."""
        return np.ones(len(self.ids), bool)

    def within(self, order: int) -> Mask:
        """Which n-grams, by where they start, lie within one text."""
        inside: Mask = self.owner[: len(self.ids) - order + 1] == self.owner[order - 1 :]
        return inside

    def sums(self, values: Mask) -> NDArray[np.int64]:
        """Number of true entries by text [count]; ``values`` is by token, or by n-gram."""
        return np.bincount(self.owner[: len(values)][values], minlength=self.count)


def batches(texts: Sequence[Sequence[int] | Ids]) -> Iterator[Texts]:
    """All texts in order, some at a time: memory is bounded by ``BATCH_TOKENS``, or by one longer text."""
    batch: list[Sequence[int] | Ids] = []
    tokens = 0
    for text in texts:
        if batch and tokens + len(text) > BATCH_TOKENS:
            yield Texts.of(batch)
            batch, tokens = [], 0
        batch.append(text)
        tokens += len(text)
    if batch:
        yield Texts.of(batch)


def keys(ids: Ids, order: int) -> Keys:
    """A 64-bit hash of each n-gram of ``order`` tokens, by where it starts."""
    tokens = ids.astype(np.uint64)
    found = _mixed(tokens + _STEP)
    for n in range(1, order):
        found = _mixed(found[:-1] * _STEP + tokens[n:])
    return found


def _mixed(x: Keys) -> Keys:
    """The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Seen:
    """A Bloom filter (Bloom 1970) over n-grams. It never calls one new that the training data had; the other way
    round it may err, the more the fuller it is."""

    bits: NDArray[np.uint8]
    """[bits / 8]; the number of bits is a power of two."""

    @classmethod
    def of(cls, texts: Sequence[Ids]) -> Seen:
        """All n-grams of these token ids."""
        grams = sum(ORDERS * len(ids) for ids in texts)
        size = LEAST_BITS
        while size < min(BITS_PER_GRAM * grams, MOST_BITS):
            size *= 2
        flags = np.zeros(size, bool)
        for batch in batches(texts):
            for order in range(1, ORDERS + 1):
                for at in _places(keys(batch.ids, order)[batch.within(order)], size):
                    flags[at] = True
        return cls(np.packbits(flags, bitorder="little"))

    def has(self, wanted: Keys) -> Mask:
        """Whether each n-gram was there."""
        known = np.ones(len(wanted), bool)
        for at in _places(wanted, 8 * len(self.bits)):
            known &= (self.bits[at >> np.uint64(3)] >> (at & np.uint64(7)).astype(np.uint8)) & 1 == 1
        return known

    def novelty(self, texts: Texts, content: Mask) -> NDArray[np.float64]:
        """Share of each text's n-grams that the training data did not have [texts]; ``content``, by token, is what
        counts."""
        total = new = np.zeros(texts.count, np.int64)
        whole = content
        for order in range(1, min(ORDERS, len(texts.ids)) + 1):
            if order > 1:
                whole = whole[:-1] & content[order - 1 :]
            wanted = whole & texts.within(order)
            total = total + texts.sums(wanted)
            unknown = wanted.copy()
            unknown[wanted] = ~self.has(keys(texts.ids, order)[wanted])
            new = new + texts.sums(unknown)
        return np.asarray(new / (total + PRIOR))


def _places(wanted: Keys, size: int) -> Iterable[Keys]:
    """The bits of each key: two hashes make any number (Kirsch and Mitzenmacher 2006)."""
    step = (wanted >> np.uint64(32)) | np.uint64(1)
    for probe in range(PROBES):
        yield (wanted + np.uint64(probe) * step) & np.uint64(size - 1)
