from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.drift.sketch.grams import PRIOR, Seen, Texts, batches, keys

text = st.lists(st.integers(0, 40), max_size=12)


def grams(ids: list[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[i : i + n]) for n in (1, 2, 3) for i in range(len(ids) - n + 1)]


@given(st.lists(text, min_size=1, max_size=6), st.lists(text, min_size=1, max_size=6))
def test_novelty_is_the_share_of_unknown_grams(known: list[list[int]], asked: list[list[int]]) -> None:
    seen = Seen.of([np.array(ids, np.int64) for ids in known])
    there = {gram for ids in known for gram in grams(ids)}
    texts = Texts.of(asked)
    found = seen.novelty(texts, texts.all)
    for ids, share in zip(asked, found, strict=True):
        mine = grams(ids)
        assert share == sum(gram not in there for gram in mine) / (len(mine) + PRIOR)  # so small a filter hardly errs


@given(st.lists(text, min_size=1, max_size=6), st.data())
def test_many_texts_at_once_are_as_one_by_one(asked: list[list[int]], data: st.DataObject) -> None:
    seen = Seen.of([np.arange(20)])
    masks = [np.array(data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))), bool) for ids in asked]
    together = seen.novelty(Texts.of(asked), np.concatenate(masks))
    alone = [seen.novelty(Texts.of([ids]), mask)[0] for ids, mask in zip(asked, masks, strict=True)]
    assert together.tolist() == alone


def test_what_was_seen_is_never_called_new() -> None:
    rng = np.random.default_rng(0)
    known = [rng.integers(0, 50_000, 3000) for _ in range(300)]
    seen = Seen.of(known)
    texts = Texts.of(known)
    assert seen.novelty(texts, texts.all).max() == 0.0
    other = Texts.of([rng.integers(0, 50_000, 3000)])
    assert 0.4 < seen.novelty(other, other.all)[0] <= 2 / 3  # every token is known, hardly any pair


def test_keys_tell_order_and_length_apart() -> None:
    ids = np.array([1, 2, 1, 0, 0, 1])
    for order in (1, 2, 3):
        distinct = {tuple(ids[i : i + order].tolist()) for i in range(len(ids) - order + 1)}
        assert len(set(keys(ids, order).tolist())) == len(distinct)
    assert keys(np.array([1, 2]), 2) != keys(np.array([2, 1]), 2)


def test_batches_hold_every_text_once_and_in_order() -> None:
    lengths = [70_000, 1, 0, 40_000, 40_000, 5]
    found = list(batches([np.full(n, i) for i, n in enumerate(lengths)]))
    assert [one.count for one in found] == [1, 3, 2]
    assert [len(one.ids) for one in found] == [70_000, 40_001, 40_005]
    assert list(batches([])) == []
