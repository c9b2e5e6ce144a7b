"""Webhooks that were given up: what counts events never falls, and what lies there now is a figure of its own."""

from __future__ import annotations

import sqlalchemy as sa
from fastapi.testclient import TestClient

from driftwatch.control.app import create_app
from driftwatch.settings import Settings
from driftwatch.store import migrate
from driftwatch.store.connection import Store
from tests.receiving import receiving

from .test_control import metrics
from .test_webhooks import courier, hook, queue


def test_sending_a_dead_one_again_takes_nothing_off_the_counter(store: Store) -> None:
    with receiving((410, {}), (410, {})) as receiver:
        one = hook(receiver.url)
        settings = Settings(webhooks=[one], control={"tick_s": 3600})
        with courier(store, one) as sender, TestClient(create_app(store, settings)) as client:

            def counted() -> tuple[float, float, float]:
                found = metrics(client)
                ended = found["driftwatch_webhook_deliveries_total"]
                lying = found["driftwatch_webhook_dead_letters"][()]
                return ended[("outcome", "delivered"),], ended[("outcome", "dead"),], lying

            queue(store, [one], "e1")
            assert counted() == (0, 0, 0)
            sender.run()
            assert counted() == (0, 1, 1)
            assert client.post("/v1/deliveries/e1/redrive").is_success
            assert counted() == (0, 1, 0)
            sender.run()
            assert counted() == (0, 2, 1), "given up again"
            assert client.post("/v1/deliveries/e1/redrive").is_success
            sender.run()
            assert counted() == (1, 2, 0)


def test_those_that_were_dead_before_the_counter_are_in_it(store_url: str) -> None:
    store = Store(store_url)
    migrate.upgrade(store, "0007")
    columns = "event_id, endpoint, type, body, state, attempts, due_at, created_at"
    with store.engine.begin() as connection:
        for state in ("dead", "delivered"):
            row = f"INSERT INTO outbox ({columns}) VALUES ('{state}', 'a', 't', '', '{state}', 16, 0, 0)"
            connection.execute(sa.text(row))
    migrate.upgrade(store)
    with store.engine.connect() as connection:
        found = connection.execute(sa.text("SELECT state, given_up FROM outbox ORDER BY state")).all()
    assert [tuple(row) for row in found] == [("dead", 1), ("delivered", 0)]
    store.close()
