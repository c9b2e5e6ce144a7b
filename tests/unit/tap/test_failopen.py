from __future__ import annotations

import asyncio
import logging

import pytest

from driftwatch.tap.failopen import FailOpen
from driftwatch.tap.metrics import Metrics


def test_what_goes_wrong_is_counted_and_said_and_ends_there(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    with caplog.at_level(logging.ERROR), FailOpen(metrics):
        raise RuntimeError("broken on purpose")
    assert metrics.registry.get_sample_value("driftwatch_dropped_total", {"reason": "recorder_error"}) == 1
    assert [record.message for record in caplog.records] == ["recording failed, the exchange goes on"]
    with FailOpen(metrics):
        pass
    assert metrics.registry.get_sample_value("driftwatch_dropped_total", {"reason": "recorder_error"}) == 1


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError])
def test_the_end_of_the_process_is_no_fault(kind: type[BaseException]) -> None:
    with pytest.raises(kind), FailOpen(Metrics()):
        raise kind
