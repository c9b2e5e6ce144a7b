"""Moving retrains from state to state: checked, and each step kept with its time and reason."""

from __future__ import annotations

import logging
from typing import cast

from sqlalchemy.orm import Session

from driftwatch.retrain.states import OPEN, State, check
from driftwatch.store import retrains
from driftwatch.store.connection import Store
from driftwatch.store.schema import Retrain

log = logging.getLogger(__name__)


def advance(session: Session, retrain: Retrain, after: State, at: float, reason: str | None = None) -> None:
    """Move a locked retrain. Raises IllegalTransition where its state does not lead there."""
    check(cast("State", retrain.state), after)
    retrains.move(session, retrain, after, at, reason)
    log.info("%s: %s%s", retrain.id, after, f" ({reason})" if reason else "")


def expire(store: Store, *, silence_s: float, now: float) -> int:
    """End open retrains of which nothing was heard for so long; their number. One that is evaluated is not silent."""
    silent = OPEN - {"candidate_ready", "evaluating"}
    with store.write() as session:
        late = [one for one in retrains.in_states(session, silent) if one.updated_at < now - silence_s]
        for retrain in late:
            advance(session, retrain, "expired", now, f"nothing heard for {silence_s / 3600:.0f} hours")
    return len(late)
