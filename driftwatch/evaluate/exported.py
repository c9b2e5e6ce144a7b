"""Step times out of what a serving engine says of itself, from its Prometheus text read every few seconds.

vLLM's ``inter_token_latency_seconds`` has one observation a request and step. So between two readings its sum / count
is the time of a step, and its sum / elapsed time the mean number of running requests (Little's law), without a gauge
that is read at one instant. Under speculation a step is a window: recorded runs of the same requests have 3,365
observations for 3,365 windows, and 7,560 for 7,560 plain steps. SGLang and TensorRT-LLM spread their times over tokens
and requests: of them `driftwatch evaluate --engine-url` measures from outside.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import httpx
from prometheus_client.parser import text_string_to_metric_families

from driftwatch.economics.profile import Bound, CostProfile
from driftwatch.economics.step import Timing
from driftwatch.errors import DriftwatchError, ProfileError

INTERVAL_S = 15.0
LEAST_STEPS = 50
"""Steps of requests in an interval, below which it is no point: the engine idled."""
MOST_MIXED = 0.02
"""Share of steps in a speculating engine's interval that may be no window of the usual length."""

NAMES = {
    "latency_s": "vllm:inter_token_latency_seconds_sum",
    "steps": "vllm:inter_token_latency_seconds_count",
    "windows": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "prompt_tokens": "vllm:request_prompt_tokens_sum",
    "output_tokens": "vllm:request_generation_tokens_sum",
    "requests": "vllm:request_prompt_tokens_count",
}


@dataclass(frozen=True)
class Reading:
    """Counters of all of a server's engines together, at a time in seconds."""

    at: float
    latency_s: float = 0.0
    steps: float = 0.0
    windows: float = 0.0
    drafted: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    requests: float = 0.0

    def since(self, earlier: Reading) -> Reading:
        """What was counted after an earlier reading; ``at`` is the time between them."""
        return Reading(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


def read(text: str, at: float) -> Reading | None:
    """None where the text is not of a vLLM, or of one that keeps no such times."""
    by_name = {theirs: ours for ours, theirs in NAMES.items()}
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if (ours := by_name.get(sample.name)) is not None:
                found[ours] = found.get(ours, 0.0) + sample.value
    return Reading(at, **found) if "steps" in found else None


def point(risen: Reading, context: float) -> Timing | None:
    """One interval as a point; None for one that idled, in which the engine restarted, or with steps of both kinds.

    A mean batch below 1 is read as 1: requests that mostly run alone.
    """
    if risen.at <= 0.0 or risen.steps < LEAST_STEPS or risen.latency_s <= 0.0:
        return None
    gamma = 0
    if risen.windows > 0.0:
        gamma = round(risen.drafted / risen.windows)
        mixed = abs(1.0 - risen.windows / risen.steps)
        uneven = abs(risen.drafted / risen.windows - gamma)
        if gamma < 1 or mixed > MOST_MIXED or uneven > MOST_MIXED * gamma:
            return None
    return Timing.exported(
        batch=max(risen.latency_s / risen.at, 1.0),
        gamma=gamma,
        token_seconds=risen.latency_s / risen.steps,
        context=context,
        repeats=int(risen.steps),
    )


def watch(
    urls: Sequence[str],
    *,
    seconds: float,
    interval_s: float = INTERVAL_S,
) -> CostProfile:
    """Read engines for a while and fit their intervals: plain engines and, of the same target, speculating ones.

    Their load has to vary in that time, or the profile holds for one batch alone. Raises DriftwatchError with one line
    if an engine cannot be read, ProfileError if its intervals do not suffice.
    """
    readings: dict[str, list[Reading]] = {url: [] for url in urls}
    with httpx.Client(timeout=10.0, trust_env=False) as client:
        for turn in range(max(2, 1 + round(seconds / interval_s))):
            if turn:
                time.sleep(interval_s)
            for url, found in readings.items():
                found.append(_ask(client, url))
    points = []
    for found in readings.values():
        whole = found[-1].since(found[0])
        context = (whole.prompt_tokens + whole.output_tokens / 2.0) / whole.requests if whole.requests > 0.0 else 0.0
        intervals = (point(after.since(before), context) for before, after in pairwise(found))
        points += [timing for timing in intervals if timing is not None]
    if not any(timing.gamma for timing in points):
        raise ProfileError("no engine speculated in that time with a constant proposal length: give one that does")
    return CostProfile.fitted(Bound("engine", "", ""), points, "engine")


def _ask(client: httpx.Client, url: str) -> Reading:
    where = f"{url.rstrip('/')}/metrics"
    try:
        answer = client.get(where).raise_for_status()
    except httpx.HTTPError as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DriftwatchError(f"engine {where}: {reason}") from None
    try:
        found = read(answer.text, time.monotonic())
    except ValueError as error:
        raise DriftwatchError(f"engine {where}: not Prometheus text: {error}") from None
    if found is None:
        raise DriftwatchError(f"engine {where}: no {NAMES['steps']} in it; only a vLLM with its metrics on can be read")
    return found
