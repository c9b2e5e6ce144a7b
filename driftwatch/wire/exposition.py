"""An engine's own metrics in the words of the acceptance definitions.

Names as of vLLM 0.33 (and before: ``gpu_cache_usage_perc``), SGLang 0.5.23 and TensorRT-LLM's 2026 main branch. What an
engine does not say is absent here too.

- vLLM: ``num_drafts`` are windows; accepted is without bonus, and counts proposals behind the last served token.
- SGLang: counters give windows only (since 0.5.16, per finished request). Its gauge ``spec_accept_length`` is over the
  last 40 decode iterations and includes the bonus; it stands still while idle, and is 0.0 without speculation and on
  prefill workers. ``spec_accept_rate`` counted the bonus before 0.5.12, and is no rate for trees: not used.
- TensorRT-LLM has no counter of windows: windows are the proposals made at the first position.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Counter = Literal["windows", "drafted_tokens", "accepted_tokens", "accepted_at_depth", "requests", "output_tokens"]
Gauge = Literal["acceptance_length", "requests_running", "requests_waiting", "kv_cache_usage_ratio"]

PATHS: Mapping[str, str] = {"vllm": "/metrics", "sglang": "/metrics", "trtllm": "/prometheus/metrics"}
"""Where an engine kind has its Prometheus text. TensorRT-LLM's ``/metrics`` is JSON, and gone once read."""
DRAINED = "/metrics"
ACCEPT = "text/plain;version=0.0.4"
"""Negotiated OpenMetrics writes ``vllm:`` names of labelled samples with an underscore."""

# Sample lines only. Label values escape quotes, so that a quote ends one.
_SAMPLE = re.compile(r"^(?:vllm|sglang|trtllm)[:_]([a-z_0-9]+)(?:\{(.*)\})? (\S+)(?: \d+)?$", re.MULTILINE)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


RANKS = ("pp_rank", "tp_rank", "moe_ep_rank")
"""Places within one engine, all of which work on the same requests."""

Sample = tuple[str, dict[str, str], float]
"""Name, labels and value of one line."""


class Series(NamedTuple):
    """Whose figure it is: one server may run several engines (data parallel), each restarting for itself."""

    engine: str
    model: str
    depth: str = ""


@dataclass
class Scrape:
    """One reading."""

    counters: dict[tuple[Counter, Series], float] = field(default_factory=dict)
    created: dict[tuple[Counter, Series], float] = field(default_factory=dict)
    """When a counter began, where the engine says so."""
    gauges: dict[tuple[Gauge, Series], float] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)


COUNTERS: Mapping[str, Mapping[str, Counter]] = {
    "vllm": {
        "spec_decode_num_drafts": "windows",
        "spec_decode_num_draft_tokens": "drafted_tokens",
        "spec_decode_num_accepted_tokens": "accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos": "accepted_at_depth",
        "request_success": "requests",
        "generation_tokens": "output_tokens",
    },
    "sglang": {
        "spec_verify_calls": "windows",
        "num_requests": "requests",
        "generation_tokens": "output_tokens",
    },
    "trtllm": {
        "spec_decode_drafted_tokens": "drafted_tokens",
        "spec_decode_accepted_tokens": "accepted_tokens",
        "request_success": "requests",
        "generation_tokens": "output_tokens",
    },
}
GAUGES: Mapping[str, Mapping[str, Gauge]] = {
    "vllm": {
        "num_requests_running": "requests_running",
        "num_requests_waiting": "requests_waiting",
        "kv_cache_usage_perc": "kv_cache_usage_ratio",
        "gpu_cache_usage_perc": "kv_cache_usage_ratio",
    },
    "sglang": {
        "spec_accept_length": "acceptance_length",
        "num_running_reqs": "requests_running",
        "num_queue_reqs": "requests_waiting",
        "token_usage": "kv_cache_usage_ratio",
    },
    "trtllm": {
        "spec_decode_acceptance_length": "acceptance_length",
        "num_requests_running": "requests_running",
        "num_requests_waiting": "requests_waiting",
        "kv_cache_utilization": "kv_cache_usage_ratio",
    },
}


def read(kind: str, text: str) -> Scrape:
    """Read Prometheus text of an engine kind; what is not understood is left out."""
    found = Scrape()
    for name, labels, value in _once(_samples(text)):
        series = Series(labels.get("engine") or labels.get("dp_rank") or "0", labels.get("model_name", ""))
        if (gauge := GAUGES[kind].get(name)) is not None:
            found.gauges[gauge, series] = value
        elif name == "cache_config_info" and labels.get("cache_dtype"):
            found.facts["kv_cache_dtype"] = labels["cache_dtype"]
        elif name.endswith("_total"):
            _count(found.counters, kind, name.removesuffix("_total"), labels, series, value)
        elif name.endswith("_created"):
            _begin(found.created, kind, name.removesuffix("_created"), labels, series, value)
    depths = [int(key.depth) for name, key in found.counters if name == "accepted_at_depth" and key.depth.isdecimal()]
    if kind == "vllm" and depths:  # registered at the start, one for each proposal of a window
        found.facts["speculative_num_draft_tokens"] = str(max(depths) + 1)
    _leave_out_what_says_nothing(kind, found)
    return found


def _count(
    counters: dict[tuple[Counter, Series], float],
    kind: str,
    name: str,
    labels: Mapping[str, str],
    series: Series,
    value: float,
) -> None:
    counter = COUNTERS[kind].get(name)
    if counter is None:
        return
    position = labels.get("position") or labels.get("token_position") or ""
    if kind == "trtllm" and position:
        if counter == "drafted_tokens" and position == "0":
            _add(counters, ("windows", series), value)
        if counter == "accepted_tokens":
            _add(counters, ("accepted_at_depth", series._replace(depth=position)), value)
        position = ""
    # Series that differ in other labels (the reason of an end, a customer) are one figure here.
    _add(counters, (counter, series._replace(depth=position)), value)


def _begin(
    created: dict[tuple[Counter, Series], float],
    kind: str,
    name: str,
    labels: Mapping[str, str],
    series: Series,
    value: float,
) -> None:
    counter = COUNTERS[kind].get(name)
    if counter is not None:
        key = counter, series._replace(depth=labels.get("position", ""))
        # The earliest of what is summed: a reason that turns up later is no restart.
        created[key] = min(value, created.get(key, value))


def _add(counters: dict[tuple[Counter, Series], float], key: tuple[Counter, Series], value: float) -> None:
    counters[key] = counters.get(key, 0.0) + value


def _leave_out_what_says_nothing(kind: str, found: Scrape) -> None:
    """Lengths below 1, of engines that do not speculate or have not yet, and those of an engine that is idle."""
    for key in [key for key in found.gauges if key[0] == "acceptance_length"]:
        running = found.gauges.get(("requests_running", key[1]), 0.0)
        if found.gauges[key] < 1.0 or not running > 0.0:
            del found.gauges[key]
    if kind == "sglang":  # the series may be there without speculation
        said = {key: value for key, value in found.counters.items() if key[0] != "windows" or value > 0.0}
        found.counters = said


def read_iterations(iterations: object, model: str = "") -> dict[tuple[Counter, Series], float]:
    """By how much counters rose over TensorRT-LLM's drained iteration statistics."""
    risen: dict[tuple[Counter, Series], float] = {}
    names: dict[str, Counter] = {
        "numRequestsWithDraftTokens": "windows",
        "numDraftTokens": "drafted_tokens",
        "numAcceptedTokens": "accepted_tokens",
    }
    for iteration in iterations if isinstance(iterations, list) else []:
        stats: Any = iteration.get("specDecodingStats") if isinstance(iteration, dict) else None
        if not isinstance(stats, dict) or not stats.get("numDraftTokens"):
            continue
        for theirs, ours in names.items():
            if isinstance(stats.get(theirs), int | float):
                _add(risen, (ours, Series("0", model)), float(stats[theirs]))
    return risen


def _once(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Samples without those that say the same a second time.

    With ``--enable-metrics-for-all-schedulers`` every rank of a tensor or pipeline group states the figures of its
    group. Which rank speaks otherwise depends: with attention data parallelism group n begins at a ``tp_rank`` of its
    own. So of ranks that differ in nothing else the first one counts, and groups (``dp_rank``) stand side by side.
    """
    first: dict[tuple[str, frozenset[tuple[str, str]]], tuple[list[int], Sample]] = {}
    for sample in samples:
        name, labels, _ = sample
        # PD: both kinds of workers see each request, and only decode has its acceptance.
        if labels.get("engine_type") == "prefill":
            continue
        rank = [int(text) if (text := labels.get(key, "0")).isdecimal() else 0 for key in RANKS]
        group = name, frozenset((key, value) for key, value in labels.items() if key not in RANKS)
        if group not in first or rank < first[group][0]:
            first[group] = rank, sample
    return (sample for _, sample in first.values())


def _samples(text: str) -> Iterator[Sample]:
    for match in _SAMPLE.finditer(text):
        name, labels, value = match.groups()
        try:
            yield name, dict(_LABEL.findall(labels or "")), float(value)
        except ValueError:
            continue
