from __future__ import annotations

import numpy as np
import pytest

from driftwatch.drift.sketch.grams import Ids, Texts
from driftwatch.drift.sketch.meaning import TABLE_BYTES, Floats, Meaning


def themes(rng: np.random.Generator, theme: int, number: int) -> list[Ids]:
    """Prompts of one theme: tokens 100 theme .. 100 theme + 99, all different where they can be."""
    return [100 * theme + rng.integers(0, 100, rng.integers(5, 60)) for _ in range(number)]


@pytest.fixture(scope="module")
def embedding() -> Floats:
    """Tokens of one theme lie around one centre."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(4, 96)).repeat(100, axis=0)
    return (centres + rng.normal(size=(400, 96))).astype(np.float32)


def test_other_words_of_a_known_theme_are_near_and_another_theme_is_far(
    embedding: Floats,
) -> None:
    rng = np.random.default_rng(1)
    meaning = Meaning.of(embedding, themes(rng, 0, 100) + themes(rng, 1, 100))
    texts = Texts.of(themes(rng, 0, 50) + themes(rng, 2, 50))
    distances = meaning.distances(texts, texts.all)
    assert np.median(distances[50:]) > np.quantile(distances[:50], 0.9)


def test_the_scale_of_the_table_says_nothing(embedding: Floats) -> None:
    rng = np.random.default_rng(2)
    prompts = themes(rng, 0, 60) + themes(rng, 1, 60)
    texts = Texts.of(themes(rng, 2, 10))
    small, large = (Meaning.of(embedding * factor, prompts).distances(texts, texts.all) for factor in (1e-4, 1e4))
    assert small == pytest.approx(large, abs=1e-3)


def test_tokens_outside_the_vocabulary_and_empty_prompts_have_no_direction(
    embedding: Floats,
) -> None:
    meaning = Meaning.of(embedding, themes(np.random.default_rng(3), 0, 80))
    texts = Texts.of([[5000, 2**31 - 1], [], [1, 5000]])
    vectors = meaning.vectors(texts, texts.all)
    assert not vectors[:2].any()
    assert vectors[2] == pytest.approx(meaning.vectors(Texts.of([[1]]), np.array([True]))[0])
    assert np.isfinite(meaning.distances(texts, texts.all)).all()


def test_a_large_vocabulary_stays_a_few_megabytes() -> None:
    table = np.random.default_rng(4).normal(size=(150_000, 64)).astype(np.float32)
    meaning = Meaning.of(table, [np.arange(i, i + 20) for i in range(100)])
    assert meaning.table.nbytes <= TABLE_BYTES
    assert meaning.table.shape[1] == 27
