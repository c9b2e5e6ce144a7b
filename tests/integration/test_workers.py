"""A worker and its store: what could not be handed in is judged after all, and renewals are not in the way of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from driftwatch.errors import StoreError
from driftwatch.settings import Settings
from driftwatch.shadow.worker import Worker
from driftwatch.store import work
from driftwatch.store.connection import Store
from driftwatch.store.schema import Replay, Work
from tests.e2e.machine import until

from .test_scale import add, count, lease
from .test_store import REPLAY

DRAFT = {"name": "incumbent", "path": "ngram:min=1,max=3"}


def test_what_could_not_be_handed_in_is_judged_after_all(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease is renewed as long as the worker lives: nobody else would ever get it."""
    add(store, "a", range(5), tokens=20)
    complete, failures = work.complete, iter([StoreError("the store is away for a moment")])

    def fails_once(*arguments: Any, **options: Any) -> int:
        for failure in failures:
            raise failure
        return complete(*arguments, **options)

    monkeypatch.setattr(work, "complete", fails_once)
    shadow = {"device": "cpu", "poll_s": 0.05, "lease_s": 60}
    worker = Worker(Settings(models=[{"name": "*", "drafts": [DRAFT]}], shadow=shadow), store)
    stop = threading.Event()
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        until(lambda: count(store, Replay) == 5, 30)
    finally:
        stop.set()
        thread.join()
    assert count(store, Work, Work.state == "done", Work.attempts == 1) == 5, "it was not the samples' fault"


def test_renewing_does_not_wait_for_what_is_handed_in(store: Store) -> None:
    """In two orders each would wait for the other: a deadlock of one worker with itself."""
    if store.url.get_backend_name() == "sqlite":
        pytest.skip("one writer at a time")
    add(store, "a", range(5))
    tasks = lease(store, 5)
    with store.write() as handing_in:
        work.complete(handing_in, "w", [work.Verdict(task, replay=REPLAY) for task in tasks[:2]], now=3.0)
        with store.write() as session:
            work.renew(session, "w", now=100.0, lease_s=60)
    assert count(store, Work, Work.state == "leased", Work.lease_until == 160.0) == 3
    assert count(store, Work, Work.state == "done") == 2
