"""Which tests a request feeds under which settings, and how the promise on false alarms is divided among them."""

from __future__ import annotations

from typing import Any

import pytest

from driftwatch.control.terms import kinds_of, rules_of, terms_of, threshold_of
from driftwatch.drift.watch import KINDS
from driftwatch.settings import Settings

REPLAYED = {"name": "incumbent", "path": "x"}


def made(*drafts: dict[str, Any], detect: dict[str, Any] | None = None, **model: Any) -> Settings:
    return Settings(models=[{"drafts": list(drafts), **model}], detect=detect or {})


@pytest.mark.parametrize(
    ("settings", "kinds", "fed"),
    [
        (made({"name": "incumbent"}), (), 1),
        (made({"name": "incumbent"}, break_even=2.0), ("below_break_even", "slower", "tail_worse"), 4),
        (made(REPLAYED), ("live_gap", "agreement"), 4),
        (made(REPLAYED, target="t"), ("surprise", "live_gap", "agreement"), 5),
        (
            made(REPLAYED | {"sketch": "s"}, target="t", break_even=2.0, detect={"two_sided": True}),
            (
                "off_share",
                "surprise",
                "live_gap",
                "agreement",
                "below_break_even",
                "slower",
                "tail_worse",
                "hit_rate_above",
            ),
            10,
        ),
    ],
)
def test_every_test_that_a_request_feeds_takes_its_share(settings: Settings, kinds: tuple[str, ...], fed: int) -> None:
    (model,) = settings.models
    assert kinds_of(settings, model, "incumbent") == kinds
    assert threshold_of(settings, model) == 100_000 * fed
    assert rules_of(settings, model).threshold == 100_000 * fed
    for kind in KINDS:
        assert terms_of(settings, model, "incumbent", kind).threshold == 100_000 * fed


def test_the_engine_runs_the_incumbent_alone() -> None:
    settings = made(REPLAYED, {"name": "second", "path": "y"})
    (model,) = settings.models
    assert "live_gap" in kinds_of(settings, model, "incumbent")
    assert kinds_of(settings, model, "second") == ()
    assert kinds_of(settings, model, "of another model") == ()
    assert threshold_of(settings, model) == 100_000 * 5, "two cells, the engine's, and two tests of the incumbent"


def test_a_figure_is_told_apart_by_what_it_depends_on() -> None:
    settings = made(REPLAYED, gamma=4, break_even=2.0)
    (model,) = settings.models
    below, slower = (terms_of(settings, model, "incumbent", kind) for kind in ("below_break_even", "slower"))
    assert (below.break_even, below.gamma) == (2.0, 4)
    assert (slower.break_even, slower.gamma) == (2.0, 4), "what is slower depends on what a window costs"
    surprise, above = (terms_of(settings, model, "incumbent", kind) for kind in ("surprise", "hit_rate_above"))
    assert (surprise.break_even, surprise.gamma, above.break_even, above.gamma) == (None, 1, None, 4)
