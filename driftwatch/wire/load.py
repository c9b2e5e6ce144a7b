"""How loaded an engine is, from its own metrics: requests that wait, and how long its users wait for a token.

| engine | waiting | time per output token |
| --- | --- | --- |
| vLLM 0.33 | ``num_requests_waiting`` | ``request_time_per_output_token_seconds`` |
| SGLang 0.5.23 | ``num_queue_reqs`` | ``request_time_per_output_token_seconds`` |
| TensorRT-LLM, 2026 main | ``num_requests_waiting`` | ``time_per_output_token_seconds`` |

The histograms hold one observation a finished request, decode time over all tokens but the first: true under
speculation, unlike ``inter_token_latency_seconds``, which holds the time between steps.
"""

from __future__ import annotations

import re
from collections import defaultdict

_WAITING = re.compile(
    r"^(?:vllm|sglang|trtllm)[:_](?:num_requests_waiting|num_queue_reqs)(?:\{(.*)\})? (\S+)$", re.MULTILINE
)
_BUCKET = re.compile(
    r"^(?:vllm|sglang|trtllm)[:_](?:request_)?time_per_output_token_seconds_bucket\{(?:.*,)?le=\"([^\"]+)\".*\} (\S+)$",
    re.MULTILINE,
)
_OTHER_RANK = re.compile(r'tp_rank="[1-9]')

Buckets = dict[float, float]
"""Requests so far at or under each edge in seconds, over all engines behind the text; the last edge is infinity."""


def requests_waiting(text: str) -> float | None:
    """Requests in the queues of all engines behind the text; None where it does not say."""
    # The ranks of one tensor-parallel engine share a queue, and may each report it.
    found = [float(value) for labels, value in _WAITING.findall(text) if not _OTHER_RANK.search(labels)]
    return sum(found) if found else None


def time_per_output_token(text: str) -> Buckets:
    """Empty where the engine has no such histogram."""
    found: defaultdict[float, float] = defaultdict(float)
    for edge, count in _BUCKET.findall(text):
        found[float(edge)] += float(count)
    return dict(sorted(found.items()))


def share_over(limit_s: float, earlier: Buckets, later: Buckets) -> tuple[float, float] | None:
    """Share of requests slower than ``limit_s`` between two readings, and how many there were; None if none.

    Counted from the first edge at or over the limit: what lies in the limit's own bucket is given the benefit of the
    doubt. After a restart of the engine the later reading counts alone.
    """
    if not later:
        return None
    if set(earlier) != set(later) or any(later[edge] < earlier[edge] for edge in later):
        earlier = dict.fromkeys(later, 0.0)
    risen = {edge: later[edge] - earlier[edge] for edge in later}
    total = risen[max(risen)]
    if total <= 0:
        return None
    under = risen[min(edge for edge in risen if edge >= limit_s)]
    return 1.0 - under / total, total
