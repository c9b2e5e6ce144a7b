"""Validity on exchangeable prompts, power on other traffic, and boilerplate that changes nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from driftwatch.drift.sketch import file
from driftwatch.drift.sketch.build import Row, build
from driftwatch.drift.sketch.grams import Ids
from driftwatch.drift.sketch.sketch import Sketch
from driftwatch.errors import SketchError
from tests.unit.drift.sketch.conftest import Prompts, rows


def off_share(sketch: Sketch, prompts: list[Ids]) -> float:
    return float(np.mean([one.side == "off" for one in sketch.score([ids.tolist() for ids in prompts])]))


def stream(rng: np.random.Generator, number: int, shift: int = 0) -> list[Ids]:
    """Prompts that are independent and alike in law: lengths log-normal, tokens by Zipf's law within a theme."""
    found = []
    for _ in range(number):
        length = int(np.clip(rng.lognormal(3.0, 0.7), 4, 200))
        ranks = np.minimum(rng.zipf(1.3, length), 180)
        found.append((ranks + 200 * rng.integers(0, 4) + shift).astype(np.int64))
    return found


def test_at_most_epsilon_of_prompts_like_the_training_data_are_off() -> None:
    rng = np.random.default_rng(0)
    embedding = rng.normal(size=(1000, 16)).astype(np.float32)
    found: list[float] = []
    reached = []
    for _ in range(60):
        sketch = build(rows(stream(rng, 240)), embedding, draft="d")
        found += [one.p for one in sketch.score([ids.tolist() for ids in stream(rng, 60)])]
        reached.append(math.floor(0.05 * (len(sketch.calibration) + 1)) / (len(sketch.calibration) + 1))
    p = np.array(found)
    for level in (0.05, 0.1, 0.25, 0.5, 0.9):
        # 60 prompts share one calibration set of 60: the mean over sets has about this spread.
        spread = math.sqrt(level * (1 - level) * (1 / 3600 + 1 / 3600))
        assert (p <= level).mean() <= level + 3 * spread
    assert (p <= 0.05).mean() == pytest.approx(np.mean(reached), abs=3 * math.sqrt(0.05 / 1800))  # exact, not only safe
    assert off_share(sketch, stream(rng, 50, shift=100)) > 0.5


@pytest.mark.parametrize(("own", "other"), [("code", "chat"), ("chat", "code")])
def test_other_traffic_is_off_and_the_same_traffic_on(prompts: Prompts, own: str, other: str) -> None:
    sketch = build(prompts.rows(f"{own}_train"), prompts.embedding, draft="d")
    assert off_share(sketch, prompts.ids[f"{own}_traffic"]) < 0.08
    assert off_share(sketch, prompts.ids[f"{other}_traffic"]) > 0.95


def test_a_production_sample_tells_how_much_is_off(prompts: Prompts) -> None:
    mixed = prompts.ids["code_traffic"][:200] + prompts.ids["chat_traffic"][:100]
    sketch = build(prompts.rows("code_train"), prompts.embedding, draft="d", production=rows(mixed))
    off = sketch.production_off
    assert off is not None
    assert off.requests == 300
    assert off.lower < 1 / 3 + 0.02 < off.upper
    assert off_share(sketch, prompts.ids["chat_traffic"][100:]) > 0.9  # what the sample has too is still off
    assert build(prompts.rows("code_train"), prompts.embedding, draft="d").production_off is None


def test_one_system_prompt_before_everything_changes_no_verdict(prompts: Prompts) -> None:
    system = np.concatenate([prompts.ids["chat_traffic"][i][25:40] for i in range(40)])  # 600 tokens never trained on

    def prefixed(texts: list[Ids]) -> list[Ids]:
        return [np.concatenate([ids[:3], system, ids[19:]]) for ids in texts]

    same, other = prompts.ids["code_traffic"], prompts.ids["chat_traffic"]
    plain = build(prompts.rows("code_train"), prompts.embedding, draft="d")
    assert off_share(plain, prefixed(same)) > 0.9  # what a sketch without a production sample would say
    seen = rows(prefixed(same[:200] + other[:100]))
    sketch = build(prompts.rows("code_train"), prompts.embedding, draft="d", production=seen)
    for fresh in (same[200:], other[100:]):
        before, after = (
            [one.side for one in scorer.score([ids.tolist() for ids in texts])]
            for scorer, texts in ((plain, fresh), (sketch, prefixed(fresh)))
        )
        changed = sum(a != b for a, b in zip(before, after, strict=True))
        assert changed <= 0.05 * len(fresh)
    assert off_share(sketch, prefixed(same[200:])) < 0.08
    assert off_share(sketch, prefixed(other[100:])) > 0.95
    (nothing,) = sketch.score([system.tolist()])
    assert (nothing.p, nothing.side, nothing.views) == (1.0, "on", None)


def test_the_same_data_gives_the_same_sketch_in_any_order_and_with_copies(prompts: Prompts) -> None:
    data = prompts.rows("chat_train")
    copies = data[::-1] + data[:50]
    first, second = (build(found, prompts.embedding, draft="d") for found in (data, copies))
    assert first.rows == second.rows == len(data)
    assert file.encode(first) == file.encode(second)


def test_output_novelty_is_a_figure_beside_the_split(prompts: Prompts) -> None:
    code = prompts.ids["code_train"]
    sketch = build([Row(ids[:-5], ids) for ids in code], prompts.embedding, draft="d")
    old, new = sketch.output_novelty([code[0].tolist(), list(range(40_000, 40_040))])
    assert old < 0.35
    assert new > 0.9


def test_too_little_data_is_said_in_one_line(prompts: Prompts) -> None:
    embedding = prompts.embedding
    few = prompts.rows("code_train")[:99]
    with pytest.raises(SketchError, match="only 99 different prompts in the training data; a sketch needs 100"):
        build(few + few, embedding, draft="d")
    with pytest.raises(SketchError, match="only 0 different prompts"):
        build([], embedding, draft="d")
    enough = prompts.rows("code_train")[:120]
    with pytest.raises(SketchError, match="epsilon 0.01 needs 99 held-out prompts, there are 30"):
        build(enough, embedding, draft="d", epsilon=0.01)
    with pytest.raises(SketchError, match="only 1 different prompts in the production sample"):
        build(enough, embedding, draft="d", production=[few[0], few[0]])
    alike = [np.append(np.arange(30), np.arange(i % 5)) for i in range(120)]
    with pytest.raises(SketchError, match="only 5 different prompts"):
        build(rows(alike), embedding, draft="d")
    digits = [np.array([i // 2**n % 2 for n in range(8)]) for i in range(256)]
    with pytest.raises(SketchError, match="all boilerplate"):
        build(rows(digits), embedding, draft="d")
