"""States of a request to retrain, and which may follow which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from driftwatch.errors import DriftwatchError

State = Literal[
    "suppressed",
    "proposed",
    "requested",
    "accepted",
    "training",
    "candidate_ready",
    "evaluating",
    "promoted",
    "rejected",
    "failed",
    "expired",
]


def _or_an_end(*after: State) -> frozenset[State]:
    """Every open one may fail or expire."""
    return frozenset((*after, "failed", "expired"))


FOLLOWS: Mapping[State, frozenset[State]] = {
    "suppressed": frozenset({"proposed"}),
    "proposed": _or_an_end("requested", "suppressed"),
    "requested": _or_an_end("accepted", "training", "candidate_ready"),
    "accepted": _or_an_end("training", "candidate_ready"),
    "training": _or_an_end("candidate_ready"),
    "candidate_ready": _or_an_end("evaluating"),
    "evaluating": _or_an_end("promoted", "rejected"),
    "promoted": frozenset(),
    "rejected": frozenset(),
    "failed": frozenset(),
    "expired": frozenset(),
}
"""A pipeline may leave out what it does not tell (``accepted``, ``training``). Nothing goes back but a decision of
which nobody was told yet, when the cause of its event turns out to be another.
"""

STATES: tuple[State, ...] = get_args(State)
OPEN: frozenset[State] = frozenset(state for state, after in FOLLOWS.items() if "expired" in after)
"""States of a request that is under way."""
REPORTED: frozenset[State] = frozenset({"accepted", "training", "failed"})
"""What a pipeline says of itself; the others follow from what is done here."""


class IllegalTransition(DriftwatchError):
    """A retrain was to go where its state does not lead."""


def check(before: State, after: State) -> None:
    """Raise IllegalTransition, naming what is possible, unless ``after`` may follow ``before``."""
    if after not in FOLLOWS[before]:
        possible = ", ".join(state for state in STATES if state in FOLLOWS[before]) or "nothing, it is over"
        raise IllegalTransition(f"a retrain that is {before} cannot become {after}; possible: {possible}")
