"""What the tap counts and times, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from driftwatch.tap.hooks import Ending
from driftwatch.wire.exchange import SKIP_REASONS, SkipReason

Outcome = Literal["ok", "client_error", "engine_error", "aborted", "unreachable"]
"""How a request ended: ``aborted`` by its client, ``client_error`` also where the tap refused it as malformed,
``engine_error`` also where the engine broke off its answer."""


def outcome_of(ending: Ending, status: int) -> Outcome:
    """What a request counts as."""
    if ending in ("aborted", "unreachable"):
        return ending
    if ending == "refused":
        return "client_error"
    if ending == "broken" or status >= 500:
        return "engine_error"
    return "client_error" if status >= 400 else "ok"


SampleOutcome = Literal["sent", "skipped", "dropped", "not_chosen"]
"""What became of an exchange that could be sampled. ``skipped`` and ``dropped`` ones are in ``dropped_total`` too."""

TapReason = Literal["recorder_error", "too_large", "memory", "queue_full", "refused", "shutdown"]
DropReason = TapReason | SkipReason
DROP_REASONS: tuple[DropReason, ...] = (*get_args(TapReason), *SKIP_REASONS)

UNRECORDED = "unrecorded"
"""Segment of requests on routes that are relayed only: health checks, model lists, embeddings."""

# Limits that people set are edges themselves, with the next ones at most a third away on both sides: so a p99 is known
# exactly enough where it is compared with a limit.
_TTFT = (
    *(0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75),
    *(1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 60.0),
)
_TPOT = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06),
    *(0.075, 0.1, 0.125, 0.15, 0.2, 0.3, 0.5, 1.0),
)
_E2E = (
    *(0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.5, 15.0, 20.0, 25.0, 30.0),
    *(40.0, 50.0, 60.0, 75.0, 90.0, 120.0, 180.0, 300.0, 600.0),
)
_ADDED = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)


class Metrics:
    """The tap's series. Every reason of ``dropped_total`` exists from the start, so that none reads as zero."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "driftwatch_requests", "Requests through the tap.", ("segment", "outcome"), registry=registry
        )
        self.time_to_first_token = Histogram(
            "driftwatch_time_to_first_token_seconds",
            "Streams: from the request's arrival to the first bytes of the answer's body.",
            ("segment",),
            buckets=_TTFT,
            registry=registry,
        )
        self.time_per_output_token = Histogram(
            "driftwatch_time_per_output_token_seconds",
            "Streams that might be sampled, a random choice where there are many, and whose engine counted the tokens:"
            " time behind the first bytes, per token behind the first.",
            ("segment",),
            buckets=_TPOT,
            registry=registry,
        )
        self.end_to_end = Histogram(
            "driftwatch_end_to_end_seconds",
            "Complete answers: from the request's arrival to the last bytes of the answer's body.",
            ("segment",),
            buckets=_E2E,
            registry=registry,
        )
        self.samples = Counter(
            "driftwatch_samples",
            "At the tap: exchanges with status 200 on recorded routes, but for those whose copy was lost before they"
            " were chosen. Control's series of this name is about what it stored.",
            ("segment", "outcome"),
            registry=registry,
        )
        self.dropped = Counter(
            "driftwatch_dropped",
            "Exchanges that gave no sample though they might have.",
            ("reason",),
            registry=registry,
        )
        self.not_asked = Counter(
            "driftwatch_not_asked",
            "Requests too large to ask for token ids in them, or of an engine that refused this lately or answered so"
            " that nothing could be taken out: their samples are tokenised again.",
            registry=registry,
        )
        self.queue_depth = Gauge("driftwatch_queue_depth", "Samples waiting for control.", registry=registry)
        self.added = Histogram(
            "driftwatch_tap_added_seconds",
            "Time between the request's last needed byte from the client and its first to the engine.",
            buckets=_ADDED,
            registry=registry,
        )
        for reason in DROP_REASONS:
            self.dropped.labels(reason)

    def request(self, segment: str, outcome: Outcome) -> None:
        self.requests.labels(segment, outcome).inc()

    def forget(self, segment: str) -> None:
        """Drop the series of a segment that has lost its place. If it comes again they begin at zero, which readers
        take for what it is: a counter that was reset."""
        for family in (
            self.requests,
            self.samples,
            self.time_to_first_token,
            self.time_per_output_token,
            self.end_to_end,
        ):
            family.remove_by_labels({"segment": segment})

    def sample(self, segment: str, outcome: SampleOutcome, count: int = 1) -> None:
        self.samples.labels(segment, outcome).inc(count)

    def drop(self, reason: DropReason, count: int = 1) -> None:
        self.dropped.labels(reason).inc(count)

    def watch_queue(self, depth: Callable[[], float]) -> None:
        self.queue_depth.set_function(depth)
