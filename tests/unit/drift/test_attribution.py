"""The table of causes: each row, what speaks against it, and that a doubt gives ``unknown``."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.drift.attribution import Findings, Part, attribute, parts_changed

SAME: frozenset[Part] = frozenset()
QUIET = Findings(
    cell_drop=False,
    off_share_up=False,
    live_below_shadow=False,
    changed=SAME,
    surprise_up=False,
    value_down=False,
    load_up=False,
)


def changed(*parts: Part) -> frozenset[Part]:
    return frozenset(parts)


@pytest.mark.parametrize(
    ("found", "cause", "action"),
    [
        (replace(QUIET, off_share_up=True), "traffic", "retrain"),
        (replace(QUIET, off_share_up=True, value_down=True), "traffic", "retrain"),
        (replace(QUIET, cell_drop=True, changed=changed("target")), "target", "rollback_target"),
        (replace(QUIET, cell_drop=True, changed=changed("draft"), surprise_up=None), "draft", "rollback_draft"),
        (replace(QUIET, cell_drop=True, surprise_up=True), "target", "rollback_target"),
        (replace(QUIET, live_below_shadow=True), "engine", "fix_engine"),
        (replace(QUIET, live_below_shadow=True, changed=changed("engine")), "engine", "fix_engine"),
        (replace(QUIET, cell_drop=True), "concept", "retrain"),
        (replace(QUIET, cell_drop=True, live_below_shadow=None), "concept", "retrain"),
        (replace(QUIET, value_down=True, load_up=True), "load", "lower_gamma"),
        (replace(QUIET, value_down=True, load_up=None), "load", "lower_gamma"),
        (replace(QUIET, value_down=True, load_up=True, below_cost_at_one=True), "load", "disable_speculation"),
        # Live figures alone
        (
            Findings(cell_drop=True, source="live", off_share_up=False, changed=changed("engine")),
            "engine",
            "fix_engine",
        ),
        (Findings(cell_drop=True, source="live", changed=SAME, surprise_up=False), "unknown", "retrain"),
        # The cause is open, what to do is not: traffic and concept both ask for new training data
        (Findings(cell_drop=True, changed=SAME), "unknown", "retrain"),
        (replace(QUIET, cell_drop=True, off_share_up=True), "unknown", "retrain"),
        # Nothing changed: it never paid
        (replace(QUIET, value_down=True, never_paid=True), "unknown", "disable_speculation"),
        (Findings(value_down=True, never_paid=True), "unknown", "disable_speculation"),
        (replace(QUIET, value_down=True, never_paid=True, cell_drop=True), "concept", "retrain"),
        # Doubts
        (QUIET, "unknown", "none"),
        (Findings(), "unknown", "none"),
        (Findings(cell_drop=True), "unknown", "none"),
        (replace(QUIET, cell_drop=True, changed=changed("target", "engine")), "unknown", "none"),
        (replace(QUIET, cell_drop=True, changed=changed("engine")), "unknown", "none"),
        (replace(QUIET, cell_drop=True, off_share_up=True, changed=changed("target")), "unknown", "none"),
        (replace(QUIET, live_below_shadow=True, changed=changed("draft")), "unknown", "none"),
        (replace(QUIET, value_down=True, load_up=False), "unknown", "none"),
        (replace(QUIET, value_down=False, load_up=True), "unknown", "none"),
        (replace(QUIET, value_down=True, load_up=None, off_share_up=None), "unknown", "none"),
        (replace(QUIET, off_share_up=True, changed=changed("target")), "unknown", "none"),
        (replace(QUIET, off_share_up=True, changed=None), "unknown", "none"),
    ],
)
def test_rows(found: Findings, cause: str, action: str) -> None:
    verdict = attribute(found)
    assert (verdict.cause, verdict.action) == (cause, action)


def test_says_what_speaks_for_it_and_against() -> None:
    verdict = attribute(replace(QUIET, cell_drop=True, changed=changed("target"), off_share_up=None))
    assert verdict.evidence == (
        "acceptance fell within cells",
        "engine and replay agree as before",
        "facts of the target changed",
    )
    assert verdict.against == ("not measured: whether more requests are off the training distribution",)
    engine = attribute(replace(QUIET, live_below_shadow=True, cell_drop=True, off_share_up=True))
    assert engine.against == ("acceptance fell within cells", "more requests are off the training distribution")
    silent = attribute(replace(QUIET, cell_drop=True, surprise_up=True))
    assert silent.against == ("no known fact of the deployment changed",)
    assert attribute(Findings()).against == ("not known: whether the deployment changed",)


maybe = st.none() | st.booleans()
findings = st.builds(
    Findings,
    cell_drop=maybe,
    source=st.sampled_from(["shadow", "live"]),
    off_share_up=maybe,
    live_below_shadow=maybe,
    changed=st.none() | st.frozensets(st.sampled_from(["target", "draft", "engine"])),
    surprise_up=maybe,
    value_down=maybe,
    never_paid=maybe,
    load_up=maybe,
    below_cost_at_one=maybe,
)
ACTIONS = {
    "traffic": {"retrain"},
    "concept": {"retrain"},
    "target": {"rollback_target"},
    "draft": {"rollback_draft"},
    "engine": {"fix_engine"},
    "load": {"lower_gamma", "disable_speculation"},
    "unknown": {"none", "retrain", "disable_speculation"},
}


@given(findings)
def test_every_combination_is_consistent(found: Findings) -> None:
    verdict = attribute(found)
    assert verdict.action in ACTIONS[verdict.cause]
    if verdict.action == "retrain":  # never where weights changed or the engine is to blame
        assert found.changed == SAME
        assert not found.live_below_shadow
        assert not found.surprise_up or verdict.cause == "traffic"
    if verdict.cause not in ("unknown", "engine"):
        assert found.cell_drop is not None
    if verdict.cause in ("draft", "engine") and found.live_below_shadow is not True:
        assert found.changed == frozenset({verdict.cause})
    if verdict.cause != "unknown":
        assert verdict.evidence


@given(findings, st.sampled_from(["cell_drop", "off_share_up", "live_below_shadow", "changed", "load_up"]))
def test_knowing_less_never_gives_another_cause(found: Findings, lost: str) -> None:
    before, after = attribute(found), attribute(replace(found, **{lost: None}))  # type: ignore[arg-type]
    allowed = {before.cause, "unknown"}
    if lost == "live_below_shadow" and found.live_below_shadow is False:
        allowed.add("engine")  # live figures alone, and the engine's facts changed
    if lost == "live_below_shadow" and found.live_below_shadow:
        return  # the gap outranks all else: without it the rest is read as if there were none
    if before.cause != "unknown":
        assert after.cause in allowed


def test_facts_belong_to_parts() -> None:
    assert parts_changed(["version", "flags.max_num_seqs"]) == {"engine"}
    assert parts_changed(["quantisation", "draft"]) == {"target", "draft"}
    assert parts_changed(["something"]) == {"engine"}
    assert parts_changed([]) == frozenset()
