"""Bodies of an endpoint's own."""

from __future__ import annotations

import pytest

from driftwatch.retrain.presets import fill

EVENT = {"id": "e1", "data": {"segment": "tenant=a", "rows": 12, "labels": {"tenant": "a"}, "none": None}}


@pytest.mark.parametrize(
    ("own", "filled"),
    [
        ("${id}", "e1"),
        ("${data.rows}", 12),
        ("${data.labels}", {"tenant": "a"}),
        ("${data.none}", None),
        ("${data.nothing.there}", None),
        ("${id.deeper}", None),
        ("run ${id}: ${data.rows} rows of ${data.labels}", 'run e1: 12 rows of {"tenant": "a"}'),
        (["${id}", 1, {"a": "${data.segment}"}], ["e1", 1, {"a": "tenant=a"}]),
        ("$id {id} ${}", "$id {id} ${}"),
    ],
)
def test_names_are_replaced_by_values(own: object, filled: object) -> None:
    assert fill(own, EVENT) == filled


def test_what_an_event_holds_is_not_filled_again() -> None:
    assert fill("${data.segment}", {"data": {"segment": "${id}"}}) == "${id}"
