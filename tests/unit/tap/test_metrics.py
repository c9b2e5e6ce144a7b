from __future__ import annotations

from driftwatch.tap.metrics import Metrics


def series(metrics: Metrics, segment: str) -> set[str]:
    found = (one for family in metrics.registry.collect() for one in family.samples)
    return {one.name for one in found if one.labels.get("segment") == segment}


def test_a_segment_that_is_forgotten_leaves_no_series_and_begins_at_zero() -> None:
    metrics = Metrics()
    for segment in ("tenant=a", "tenant=b"):
        metrics.request(segment, "ok")
        metrics.request(segment, "aborted")
        metrics.sample(segment, "sent", 2)
        for histogram in (metrics.time_to_first_token, metrics.time_per_output_token, metrics.end_to_end):
            histogram.labels(segment).observe(1.0)
    kept = series(metrics, "tenant=b")
    metrics.forget("tenant=a")
    metrics.forget("tenant=never")
    assert series(metrics, "tenant=a") == set()
    assert series(metrics, "tenant=b") == kept
    metrics.request("tenant=a", "ok")
    labels = {"segment": "tenant=a", "outcome": "ok"}
    assert metrics.registry.get_sample_value("driftwatch_requests_total", labels) == 1.0
