"""vLLM's dialect: token ids and per-request figures, and the injection that asks for them.

vLLM gives token ids when a request says ``return_token_ids``, and its figures on the usage event of a stream. Clients
rarely ask, so :func:`inject` asks for them and :class:`~driftwatch.wire.strip.Stripper` takes out of the answer what
only the tap wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from driftwatch.records import Record
from driftwatch.wire import openai
from driftwatch.wire.exchange import Exchange, Skip
from driftwatch.wire.injection import Injected

ENGINE_FIGURES = {
    "windows": "num_spec_steps",
    "drafted": "num_draft_tokens",
    "accepted": "num_accepted_draft_tokens",
    "accepted_histogram": "acceptance_histogram",
    "accepted_per_window": "per_step_accepted",
    "drafted_per_window": "per_step_drafted",
}
"""Record.engine in the words of the acceptance definitions, and vLLM's name for each."""


def record(exchange: Exchange) -> Record:
    """The record of an exchange, with token ids and figures where vLLM gave them. Raises Skip."""
    parsed = openai.parse(exchange)
    values, _ = openai.with_ids(exchange, parsed)
    values["engine"] = _figures(parsed)
    for answer in parsed.answers:
        if isinstance(answer.get("system_fingerprint"), str):
            values["deployment"]["system_fingerprint"] = answer["system_fingerprint"]
    return openai.build(values)


def inject(path: str, body: bytes, facts: Mapping[str, str] | None = None) -> Injected | None:
    """Ask for token ids, and for the usage event of a stream, where the client did not.

    Every version takes this: older ones ignore it. None if there is nothing to add, if the exchange could give no
    record anyway, or if the body is not understood: it then goes on untouched.
    """
    if path not in openai.ROUTES:
        return None
    try:
        request = orjson.loads(body)
        if not isinstance(request, dict):
            return None
        openai.check_request(path, request)
    except (orjson.JSONDecodeError, Skip):
        return None
    options = request.get("stream_options") or {}
    # vLLM takes 1 and "true" for yes as well.
    ids = request.get("return_token_ids") in (None, False, 0, "0", "false")
    # With continuous_usage_stats the usage would turn up on every event: those clients keep what they asked for.
    usage = (
        request.get("stream") is True
        and isinstance(options, dict)
        and not (options.get("include_usage") or options.get("continuous_usage_stats"))
    )
    if ids:
        request["return_token_ids"] = True
    if usage:
        request["stream_options"] = {**options, "include_usage": True}
    return Injected(orjson.dumps(request), ids, usage) if ids or usage else None


def _figures(parsed: openai.Parsed) -> dict[str, Any] | None:
    for answer in reversed(parsed.answers):
        metrics = answer.get("metrics")
        stats = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        if isinstance(stats, dict):
            return {ours: stats.get(theirs) for ours, theirs in ENGINE_FIGURES.items()}
    return None
