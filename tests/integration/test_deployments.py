"""Which changes of what serves are told: on a real SQLite and a real PostgreSQL."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sqlalchemy as sa

from driftwatch.control import changes
from driftwatch.records import Record
from driftwatch.settings import Settings
from driftwatch.store import deployments, samples
from driftwatch.store.connection import Store
from driftwatch.store.deployments import TAKEN_OVER
from driftwatch.store.schema import Deployment

FACTS = {"engine": "vllm", "version": "0.32.0", "target": "m-7b"}
OLD, NEW, OTHER = FACTS, FACTS | {"version": "0.33.0"}, FACTS | {"version": "0.34.0", "target": "m-8b"}


class Traffic:
    """Samples into a store, one after the other, as control takes them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ids = itertools.count()

    def serve(self, facts: dict[str, str], times: int = 1, **fields: Any) -> list[tuple[str, list[str]]]:
        """The cause of each change that is told, and the facts that changed."""
        told: list[tuple[str, list[str]]] = []
        for _ in range(times):
            number = next(self._ids)
            values = {"prompt_token_ids": [1], "output_token_ids": [2, 3], "deployment": facts, "model": "m"} | fields
            with self._store.write() as session:
                stored = samples.add(
                    session, [(Record(id=f"r{number}", **values), [])], now=1000.0 + number, max_segments=9
                )
                for change in stored.changes:
                    changes.tell(session, Settings(), change, 1000.0 + number)
                    told.append((change.cause, sorted(change.facts)))
        return told

    def in_use(self) -> list[str]:
        """Versions of the model's deployments, what began to serve last first."""
        with self._store.read() as session:
            began = deployments.since(session)
            known = session.scalars(sa.select(Deployment).where(Deployment.model == "m")).all()
            return [one.facts["version"] for one in sorted(known, key=lambda one: -began[one.id])]

    def gone(self) -> list[bool]:
        """Of each deployment, oldest first."""
        with self._store.read() as session:
            known = session.scalars(sa.select(Deployment).order_by(Deployment.id)).all()
            return [deployments.is_gone(session, one) for one in known]


@pytest.fixture
def traffic(store: Store) -> Traffic:
    return Traffic(store)


def test_going_back_to_what_was_there_before_is_a_change(traffic: Traffic) -> None:
    assert traffic.serve(OLD, 5) == []
    assert traffic.serve(NEW, TAKEN_OVER) == [("engine", ["version"])]
    assert traffic.serve(OLD, TAKEN_OVER) == [("engine", ["version"])], "rolled back, told once"
    assert traffic.serve(NEW, 3) == [("engine", ["version"])], "and forward again"
    assert traffic.serve(OTHER, TAKEN_OVER) == [("unknown", ["target", "version"])]
    assert traffic.serve(OLD, 3) == [("unknown", ["target", "version"])], "back over two"


@pytest.mark.parametrize("share", [2, 10])
def test_two_side_by_side_are_one_change(traffic: Traffic, share: int) -> None:
    """A roll-out in either direction, and a canary with a tenth of the traffic that lasts."""
    traffic.serve(OLD, 5)
    told = [one for number in range(3 * TAKEN_OVER) for one in traffic.serve(NEW if number % share == 0 else OLD)]
    assert told == [("engine", ["version"])]


def test_what_requests_themselves_bring_is_no_way_back(traffic: Traffic) -> None:
    traffic.serve(OLD, 5)
    traffic.serve(NEW, TAKEN_OVER)
    assert traffic.serve(NEW | {"kv_cache_dtype": "fp8"}) == [], "learnt"
    assert traffic.serve(NEW, adapter="a") == []
    assert traffic.serve({"engine": "vllm"}) == [], "an engine in doubt may be this one"
    assert traffic.serve(OLD, TAKEN_OVER, adapter="a") == [("engine", ["version"])]
    assert traffic.serve(OLD, 3) == [], "the same server, without the adapter"


def test_models_are_apart(traffic: Traffic) -> None:
    traffic.serve(OLD, 5)
    traffic.serve(NEW, 2)
    assert traffic.serve(NEW, TAKEN_OVER, model="other") == []
    assert traffic.serve(OLD, 2) == [], "two samples are no taking over"


def test_what_was_gone_back_to_is_what_serves(traffic: Traffic) -> None:
    """With the adapters that ran beside it; what it replaced has gone once the last samples are not of it."""
    for adapter in ("a", "b"):
        traffic.serve(OLD, 2, adapter=adapter)
    traffic.serve(NEW, TAKEN_OVER, adapter="a")
    assert traffic.in_use() == ["0.33.0", "0.32.0", "0.32.0"]
    assert traffic.gone() == [True, True, False]
    traffic.serve(OLD, TAKEN_OVER, adapter="a")
    assert traffic.in_use() == ["0.32.0", "0.32.0", "0.33.0"]
    assert traffic.gone() == [False, False, True]
    traffic.serve(OTHER, 1, model="other")
    assert traffic.gone() == [False, False, True, False]
