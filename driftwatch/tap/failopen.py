"""Recording fails open: what goes wrong in it is counted, and the exchange goes on."""

from __future__ import annotations

import logging

from driftwatch.tap.metrics import Metrics

logger = logging.getLogger(__name__)


class FailOpen:
    """A ``with`` block that ends at its first exception instead of raising it. The exception is counted."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._metrics.drop("recorder_error")
        logger.error("recording failed, the exchange goes on", exc_info=error)
        return True
