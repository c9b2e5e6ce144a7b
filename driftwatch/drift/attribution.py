"""Which change is behind an event: traffic, target, draft, engine, concept or load; else unknown.

A table over what is known beside the event (design: drop within cells, off-share, live against replay, facts of the
deployment, the target's surprise). A cause is named only if everything the table asks for is there and nothing
speaks for another; what was not measured is ``None``, never False. A wrong cause sends people to retrain when they
should roll back a flag, an unknown one merely makes them look.

| drop in cells | off-share up | live below shadow | facts changed | cause | action |
| --- | --- | --- | --- | --- | --- |
| any | any | yes | none, or engine | engine | fix_engine |
| yes, of live figures | not up | not measured | engine | engine | fix_engine |
| yes | not up | no, or not measured | target | target | rollback_target |
| yes | not up | no, or not measured | draft | draft | rollback_draft |
| yes | not up | no, or not measured | none, target's surprise up | target (a silent change) | rollback_target |
| yes, of the replay | no | no, or not measured | none, target's surprise as before | concept | retrain |
| no | yes | not seen | none | traffic | retrain |
| no | not up | not seen | none, value down, load up or not measured | load | lower_gamma, disable_speculation |
| not seen | not up | not seen | any, value down from the start | unknown | disable_speculation |

One row is a middle way: a drop within cells with no fact changed, no gap and no surprise, but no sketch, no target at
hand, or a raised off-share beside it. Traffic and concept are then both possible; the cause is ``unknown``, and the
action the one that they share, ``retrain``. So it is where there are live figures alone: an engine that broke with none
of its facts changed looks the same there, and the verdict says that this was not measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Cause = Literal["traffic", "target", "draft", "engine", "concept", "load", "unknown"]
Action = Literal[
    "retrain", "rollback_target", "rollback_draft", "fix_engine", "lower_gamma", "disable_speculation", "none"
]
Part = Literal["target", "draft", "engine"]

PARTS_OF: dict[str, Part] = {
    "target": "target",
    "adapter": "target",
    "quantisation": "target",
    "tokenizer": "target",
    "chat_template": "target",
    "draft": "draft",
    "engine": "engine",
    "version": "engine",
    "flags": "engine",
}
"""Which part of a deployment a fact belongs to."""


def parts_changed(facts: Iterable[str]) -> frozenset[Part]:
    """The parts behind names of facts; a dotted name counts by its first word, an unknown one as the engine's."""
    return frozenset(PARTS_OF.get(fact.split(".")[0], "engine") for fact in facts)


@dataclass(frozen=True)
class Findings:
    """What is known at an event, over the same period; None where it was not, or not yet, measured."""

    cell_drop: bool | None = None
    """Acceptance fell within cells (their detectors), not merely in the total. A cell ``off`` does not count while the
    off-share is up: what is flagged then holds fewer flagged by mistake, so its mean falls with nothing changed."""
    source: Literal["shadow", "live"] = "shadow"
    """Whose figures the cells hold. A replay does not run the engine, so its drops are never the engine's."""
    off_share_up: bool | None = None
    live_below_shadow: bool | None = None
    """The engine accepts less than the replay, or in other windows, beyond the usual gap."""
    changed: frozenset[Part] | None = None
    """Parts whose facts changed at the start of the event; empty: all known facts stayed."""
    surprise_up: bool | None = None
    """The target recorded here finds the served tokens less likely than it used to."""
    value_down: bool | None = None
    """Below break-even, or more requests made slower."""
    load_up: bool | None = None
    """Larger batches, so that verification costs more."""
    never_paid: bool | None = None
    """Value was down from the start, so that nothing need have changed."""
    below_cost_at_one: bool | None = None
    """Even a gamma of 1 does not pay at this load."""


@dataclass(frozen=True)
class Verdict:
    """The cause, what speaks for and against it, and what to do; the sentences are for people."""

    cause: Cause
    action: Action
    evidence: tuple[str, ...]
    against: tuple[str, ...]


_SENTENCES: tuple[tuple[str, str, str], ...] = (
    ("cell_drop", "acceptance fell within cells", "acceptance within cells is as before"),
    ("off_share_up", "more requests are off the training distribution", "the off-distribution share is as before"),
    ("live_below_shadow", "the engine accepts less than the replay", "engine and replay agree as before"),
    ("surprise_up", "the target finds the served tokens less likely", "the target's surprise is as before"),
    ("value_down", "speculation pays less", "speculation pays as before"),
    ("load_up", "batches are larger", "the load is as before"),
)


def attribute(found: Findings) -> Verdict:
    """Read the table; anything that does not fit a row is ``unknown``."""
    cause, action, wanted = _row(found)
    evidence, against = [], []
    for name, yes, no in _SENTENCES:
        value: bool | None = getattr(found, name)
        if value is None:
            if name in wanted:
                against.append(f"not measured: whether {yes}")
        elif cause == "unknown":
            if value:
                evidence.append(yes)
        elif name in wanted:
            (evidence if value == wanted[name] else against).append(yes if value else no)
        elif value:  # true, and not a sign of this cause
            against.append(yes)
    for part in sorted(found.changed or ()):
        if cause in (part, "unknown"):
            evidence.append(f"facts of the {part} changed")
        else:
            against.append(f"facts of the {part} changed")
    if found.changed is None:
        against.append("not known: whether the deployment changed")
    elif not found.changed:
        (against if cause in ("target", "draft") else evidence).append("no known fact of the deployment changed")
    return Verdict(cause, action, tuple(evidence), tuple(against))


Row = tuple[Cause, Action, dict[str, bool]]
_UNKNOWN: Row = ("unknown", "none", {})


def _row(found: Findings) -> Row:
    """Cause and action, with what the row expects of the findings."""
    changed = found.changed
    if found.live_below_shadow:
        # The replay runs target and draft as recorded, so a gap lies in what the engine does with them. New weights
        # that the replay does not run yet make a gap as well, hence no verdict once those facts changed.
        if changed is not None and changed & {"target", "draft"}:
            return _UNKNOWN
        return "engine", "fix_engine", {"live_below_shadow": True}
    if found.cell_drop:
        return _within_cells(found)
    if found.never_paid and not found.off_share_up:
        return "unknown", "disable_speculation", {}
    if found.cell_drop is None or changed is None or changed:
        return _UNKNOWN
    if found.off_share_up:
        return "traffic", "retrain", {"off_share_up": True, "cell_drop": False, "live_below_shadow": False}
    # Value may go down with the mix as well: without a sketch only a load that is known to be up will do. A load that
    # costs nothing is no event.
    if found.value_down and (found.load_up or (found.load_up is None and found.off_share_up is False)):
        action: Action = "disable_speculation" if found.below_cost_at_one else "lower_gamma"
        return "load", action, {"value_down": True, "load_up": True, "cell_drop": False, "off_share_up": False}
    return _UNKNOWN


def _within_cells(found: Findings) -> Row:
    """Acceptance fell within cells, and no gap was seen."""
    if found.changed is None or len(found.changed) > 1:
        return _UNKNOWN
    fell = {"cell_drop": True, "off_share_up": False, "live_below_shadow": False}
    if found.changed:
        if found.off_share_up:  # new traffic in the same hour explains the fall no worse
            return _UNKNOWN
        (part,) = found.changed
        if part == "target":
            return "target", "rollback_target", fell
        if part == "draft":
            return "draft", "rollback_draft", fell
        live_alone = found.source == "live" and found.live_below_shadow is None
        return ("engine", "fix_engine", {"cell_drop": True, "off_share_up": False}) if live_alone else _UNKNOWN
    if found.surprise_up:
        return _UNKNOWN if found.off_share_up else ("target", "rollback_target", fell | {"surprise_up": True})
    live_alone = found.source == "live" and found.live_below_shadow is None
    if live_alone or found.surprise_up is None or found.off_share_up is not False:
        return "unknown", "retrain", {"live_below_shadow": False} if live_alone else {}
    return "concept", "retrain", fell | {"surprise_up": False}
