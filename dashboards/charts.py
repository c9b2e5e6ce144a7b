"""What the dashboards show: every panel with its queries, unit and what it means.

Every query names metrics that driftwatch itself exports. Ratios are formed over summed counts, never averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

CELL = 'model=~"$model",draft=~"$draft",segment=~"$segment",split=~"$split"'
LIVE_CELL = 'model=~"$model",draft=~"$draft",segment=~"$segment"'
SEGMENT = 'segment=~"$segment"'
BY_CELL = "{{segment}} {{split}}"
GREEN, YELLOW, RED = "green", "orange", "red"


@dataclass(frozen=True)
class Query:
    """PromQL and what its series are called."""

    expr: str
    legend: str = "__auto"


@dataclass(frozen=True)
class Chart:
    """One panel; ``steps`` are (from, colour), the first colour reaching down to the lowest value."""

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    kind: Literal["timeseries", "stat", "table"] = "timeseries"
    width: int = 12
    height: int = 8
    steps: Sequence[tuple[float | None, str]] = ((None, GREEN),)
    maximum: float | None = None


def opened(labels: str) -> str:
    """Events that are open, of replays and of what engines report."""
    shadow = f"max by (model, draft, segment, split, kind, cause) (driftwatch_drift_active{{{labels}}}) == 1"
    return f"{shadow} or max by (model, draft, segment, kind, cause) (driftwatch_live_drift_active{{{labels}}}) == 1"


def ratio(numerator: str, denominators: Sequence[str], labels: str, by: str, window: str = "$__rate_interval") -> str:
    """A ratio of summed rates; absent where nothing was counted."""

    def summed(name: str) -> str:
        return f"sum by ({by}) (rate({name}{{{labels}}}[{window}]))"

    whole = " + ".join(summed(name) for name in denominators)
    return f"{summed(numerator)} / (({whole}) > 0)"


def estimate(name: str, labels: str = CELL, legend: str = BY_CELL) -> list[Query]:
    """A figure with the limits of its interval."""
    prefix = f"driftwatch_{name}"
    return [
        Query(f"{prefix}{{{labels}}}", legend),
        Query(f"{prefix}_lower{{{labels}}}", f"{legend} lower"),
        Query(f"{prefix}_upper{{{labels}}}", f"{legend} upper"),
    ]


def both(name: str, shadow: str = BY_CELL, live: str = "live {{segment}}") -> list[Query]:
    """A figure of replays, and beside it what the engine's own figures make of it."""
    return [
        Query(f"driftwatch_{name}{{{CELL}}}", shadow),
        Query(f"driftwatch_live_{name}{{{LIVE_CELL}}}", live),
    ]


def quantiles(name: str, labels: str, by: Sequence[str]) -> list[Query]:
    """p50, p95 and p99 of a histogram, for each value of the labels in ``by``."""
    called = "".join(f"{{{{{label}}}}} " for label in by)
    summed = f"sum by ({', '.join((*by, 'le'))}) (rate({name}_bucket{{{labels}}}[$__rate_interval]))"
    return [Query(f"histogram_quantile({q}, {summed})", f"{called}p{q * 100:g}") for q in (0.5, 0.95, 0.99)]


Rows = Sequence[tuple[str, Sequence[Chart]]]

EVIDENCE = Chart(
    "Evidence of drift",
    "Log of the evidence over its alarm level: an event opens at 1.",
    "short",
    [
        Query(f"driftwatch_drift_evidence_ratio{{{LIVE_CELL}}}", "{{segment}} {{split}} {{kind}}"),
        Query(f"driftwatch_live_drift_evidence_ratio{{{LIVE_CELL}}}", "{{segment}} live {{kind}}"),
    ],
    steps=((None, GREEN), (0.7, YELLOW), (1.0, RED)),
)

OVERVIEW: Rows = [
    (
        "Is it worth it?",
        [
            Chart(
                "Speedup by segment",
                "Predicted speedup of decoding over decoding without a draft: acceptance length over its break-even. "
                "Below 1 speculation costs more than it saves. Lower and upper limits are in the Segment dashboard.",
                "none",
                both("speedup_ratio"),
                kind="stat",
                steps=((None, RED), (1.0, YELLOW), (1.05, GREEN)),
            ),
            Chart(
                "Open events",
                "What has changed and has not recovered, with the cause where one could be named. Empty: nothing has.",
                "short",
                [Query(opened(LIVE_CELL))],
                kind="table",
            ),
        ],
    ),
    (
        "Where?",
        [
            Chart(
                "Acceptance length by segment",
                "Tokens per window over the last 24 hours, bonus included, of what was replayed.",
                "short",
                both("acceptance_length"),
            ),
            Chart(
                "Hit rate by segment",
                "Accepted over tested proposals: what drift is detected on.",
                "percentunit",
                both("hit_rate"),
                maximum=1.0,
            ),
            Chart(
                "Requests made slower",
                "Share of requests that would have been faster without speculation.",
                "percentunit",
                both("slower_requests_ratio"),
                steps=((None, GREEN), (0.05, YELLOW), (0.2, RED)),
                maximum=1.0,
            ),
            Chart(
                "Cost of a million output tokens",
                "Without speculation, with it, and without it on as many GPUs more as give the same latency. In the "
                "currency of `value.gpu_hour_price`.",
                "short",
                [Query(f"driftwatch_cost_per_million_tokens{{{CELL}}}", "{{segment}} {{split}} {{mode}}")],
            ),
            Chart(
                "Off the training distribution",
                "Share of requests that do not look like what the draft was trained on. Needs a sketch.",
                "percentunit",
                [Query(f"driftwatch_off_distribution_ratio{{{LIVE_CELL}}}", "{{segment}}")],
                maximum=1.0,
            ),
        ],
    ),
    (
        "Since when?",
        [
            Chart(
                "Hit rate over time, all replayed requests",
                "Weighted to all traffic, so that a sum over segments is what users see.",
                "percentunit",
                [
                    Query(
                        ratio(
                            "driftwatch_estimated_accepted_tokens_total",
                            (
                                "driftwatch_estimated_accepted_tokens_total",
                                "driftwatch_estimated_rejected_tokens_total",
                            ),
                            CELL,
                            "model, draft",
                            "1h",
                        ),
                        "{{model}} {{draft}}",
                    )
                ],
                maximum=1.0,
            ),
            EVIDENCE,
            Chart(
                "Time per output token",
                "As users see it, by the tap's own clock.",
                "s",
                quantiles("driftwatch_time_per_output_token_seconds", SEGMENT, ["segment"]),
            ),
            Chart(
                "Requests",
                "Through the tap, by how they ended.",
                "reqps",
                [
                    Query(
                        f"sum by (outcome) (rate(driftwatch_requests_total{{{SEGMENT}}}[$__rate_interval]))",
                        "{{outcome}}",
                    )
                ],
            ),
        ],
    ),
]

ONE_SEGMENT: Rows = [
    (
        "Acceptance",
        [
            Chart(
                "Acceptance length against break-even",
                "With its 95% interval over requests. Under the break-even line speculation costs more than it saves.",
                "short",
                [
                    *estimate("acceptance_length"),
                    Query(f"driftwatch_break_even_acceptance_length{{{CELL}}}", "break-even {{segment}} {{split}}"),
                ],
            ),
            Chart(
                "Hit rate against its baseline",
                "With its 95% interval over requests; the baseline is frozen once enough is known.",
                "percentunit",
                [
                    *estimate("hit_rate"),
                    Query(f"driftwatch_baseline_hit_rate{{{CELL}}}", "baseline {{segment}} {{split}}"),
                ],
                maximum=1.0,
            ),
            Chart(
                "Survival by depth",
                "Share of windows whose proposal at this depth was accepted.",
                "percentunit",
                [
                    Query(
                        f"sum by (depth) (rate(driftwatch_shadow_accepted_at_depth_total{{{CELL}}}[1h])) "
                        f"/ on () group_left () (sum(rate(driftwatch_shadow_windows_total{{{CELL}}}[1h])) > 0)",
                        "depth {{depth}}",
                    )
                ],
                maximum=1.0,
            ),
            Chart(
                "Live against shadow",
                "What the engine reports beside what the replay says it should: shadow steady and live falling is a "
                "fault of the engine, both falling is drift.",
                "percentunit",
                both("hit_rate", "shadow {{segment}} {{split}}"),
                maximum=1.0,
            ),
        ],
    ),
    (
        "What users feel",
        [
            Chart(
                "Steps per token",
                "Passes of the target per output token, by quantile of requests: 1 is plain decoding.",
                "short",
                [Query(f"driftwatch_steps_per_token{{{CELL}}}", "{{segment}} {{split}} p{{quantile}}")],
                maximum=1.0,
            ),
            Chart(
                "Predicted speedup",
                "Of decoding, with its 95% interval.",
                "short",
                estimate("speedup_ratio"),
                steps=((None, RED), (1.0, GREEN)),
            ),
            Chart(
                "Predicted time per output token against plain decoding",
                "By quantile of requests: over 1 a request takes longer with speculation. A median under 1 and a p99 "
                "over 1 is two kinds of requests in one segment.",
                "none",
                [Query(f"driftwatch_token_time_ratio{{{CELL}}}", "{{segment}} {{split}} p{{quantile}}")],
                steps=((None, GREEN), (1.0, RED)),
            ),
            Chart(
                "Best proposal length",
                "The gamma that would pay most at today's acceptance; 0 is no speculation.",
                "none",
                [Query(f"driftwatch_best_gamma{{{CELL}}}", BY_CELL)],
            ),
            Chart(
                "Time to first token",
                "By the tap's own clock.",
                "s",
                quantiles("driftwatch_time_to_first_token_seconds", SEGMENT, ["segment"]),
            ),
            Chart(
                "Time per output token",
                "By the tap's own clock, over tokens that the engine counted.",
                "s",
                quantiles("driftwatch_time_per_output_token_seconds", SEGMENT, ["segment"]),
            ),
        ],
    ),
    (
        "What changed",
        [
            Chart(
                "Off the training distribution",
                "Share of requests that do not look like what the draft was trained on, with its 95% interval.",
                "percentunit",
                estimate("off_distribution_ratio", LIVE_CELL, "{{segment}}"),
                maximum=1.0,
            ),
            replace(EVIDENCE, title="Evidence"),
            Chart(
                "State of the baseline",
                "Learning until the interval is narrow enough; watching; drifting while an event is open.",
                "short",
                [
                    Query(
                        f"driftwatch_baseline_state{{{LIVE_CELL}}} == 1 "
                        f"or driftwatch_live_baseline_state{{{LIVE_CELL}}} == 1"
                    )
                ],
                kind="table",
            ),
            Chart(
                "Deployments",
                "Facts that driftwatch has learnt of what serves.",
                "short",
                [Query("driftwatch_deployment_info")],
                kind="table",
            ),
        ],
    ),
]

ITSELF: Rows = [
    (
        "Tap",
        [
            Chart(
                "Time that the tap adds",
                "From the last needed byte of a request to its first byte on the way to the engine.",
                "s",
                quantiles("driftwatch_tap_added_seconds", "", []),
                steps=((None, GREEN), (0.005, YELLOW), (0.05, RED)),
            ),
            Chart(
                "Requests",
                "By how they ended.",
                "reqps",
                [Query("sum by (outcome) (rate(driftwatch_requests_total[$__rate_interval]))", "{{outcome}}")],
            ),
            Chart(
                "Samples",
                "By what became of them: what a tap did, and what control and shadow did with those that were sent.",
                "reqps",
                [
                    Query(
                        "sum by (job, outcome) (rate(driftwatch_samples_total[$__rate_interval]))",
                        "{{job}} {{outcome}}",
                    )
                ],
            ),
            Chart(
                "Dropped",
                "Exchanges that gave no sample though they might have, by reason.",
                "reqps",
                [Query("sum by (reason) (rate(driftwatch_dropped_total[$__rate_interval]))", "{{reason}}")],
            ),
        ],
    ),
    (
        "Shadow",
        [
            Chart(
                "Lag",
                "Age of the oldest sample that waits for its replay.",
                "s",
                [Query("driftwatch_shadow_lag_seconds", "lag")],
                steps=((None, GREEN), (600, YELLOW), (3600, RED)),
            ),
            Chart(
                "Busy",
                "Share of the last minute that each worker spent on batches.",
                "percentunit",
                [Query("driftwatch_shadow_busy_ratio", "{{instance}}")],
                maximum=1.0,
            ),
            Chart(
                "Waiting for room",
                "What a worker's next batch waits for, out of courtesy or need.",
                "short",
                [Query("driftwatch_shadow_paused", "{{instance}} {{reason}}")],
                maximum=1.0,
            ),
            Chart(
                "Requests and tokens judged",
                "Replays that became part of a cell.",
                "cps",
                [
                    Query("sum(rate(driftwatch_shadow_requests_total[$__rate_interval]))", "requests"),
                    Query("sum(rate(driftwatch_shadow_tokens_total[$__rate_interval]))", "tokens"),
                ],
            ),
        ],
    ),
    (
        "Control",
        [
            Chart(
                "Queues",
                "Samples that wait for a replay, or in a tap for control; webhooks that wait to be delivered, and those"
                " that were given up and lie there until they are sent again.",
                "short",
                [
                    Query('max by (queue) (driftwatch_queue_depth{queue!=""})', "{{queue}}"),
                    Query('sum(driftwatch_queue_depth{queue=""})', "in taps"),
                    Query("max(driftwatch_webhook_dead_letters)", "webhooks given up"),
                ],
            ),
            Chart(
                "Samples that were not judged",
                "Skipped or failed, and why: what a sample lacks, or what a worker's log explains.",
                "cps",
                [
                    Query(
                        "sum by (outcome, reason) (rate(driftwatch_samples_unjudged_total[$__rate_interval]))",
                        "{{outcome}} {{reason}}",
                    )
                ],
            ),
            Chart(
                "Webhook deliveries",
                "Delivered, or given up after many tries.",
                "cps",
                [
                    Query(
                        "sum by (outcome) (rate(driftwatch_webhook_deliveries_total[$__rate_interval]))", "{{outcome}}"
                    )
                ],
            ),
        ],
    ),
]
