from __future__ import annotations

import numpy as np

from driftwatch.drift.sketch.boilerplate import LEAST, SPAN, Boilerplate
from driftwatch.drift.sketch.grams import Texts


def test_a_shared_beginning_and_end_are_no_content() -> None:
    rng = np.random.default_rng(0)
    head, tail = np.arange(1000, 1040), np.arange(2000, 2000 + SPAN)
    middles = [rng.integers(0, 900, 30) for _ in range(100)]
    boilerplate = Boilerplate.of([np.concatenate([head, middle, tail]) for middle in middles])
    content = boilerplate.content(Texts.of([np.concatenate([head, middles[0], tail]), middles[1]]))
    assert content.tolist() == [False] * 40 + [True] * 30 + [False] * SPAN + [True] * 30


def test_what_few_prompts_share_is_content() -> None:
    rng = np.random.default_rng(1)
    shared = np.arange(1000, 1020)
    few = [np.concatenate([shared, rng.integers(0, 900, 30)]) for _ in range(LEAST - 1)]
    others = [rng.integers(0, 900, 50) for _ in range(60)]
    texts = Texts.of([few[0]])
    assert Boilerplate.of(few + others).content(texts).all()
    assert not Boilerplate.of(few + others, [*few, few[0]]).content(texts).all()  # a second sample where it is common


def test_runs_across_two_texts_do_not_count() -> None:
    run = np.arange(SPAN)
    boilerplate = Boilerplate.of([np.concatenate([run, [100 + i]]) for i in range(LEAST)])
    assert boilerplate.content(Texts.of([run[:2], run[2:]])).all()
    assert not boilerplate.content(Texts.of([run])).any()
    assert boilerplate.content(Texts.of([[], [1]])).tolist() == [True]
