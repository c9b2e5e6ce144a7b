"""TensorRT-LLM's dialect (``trtllm-serve``). Its request bodies forbid unknown fields, so nothing is ever asked for.

Figures come with the choices: ``speculative_decoding`` where the version has it (pull request 19311), else
``avg_decoded_tokens_per_iter``, which is the request's tokens per step, bonus included. Ids come with completions whose
client asked for them (``detokenize: false``).
"""

from __future__ import annotations

from typing import Any

from driftwatch.records import Record
from driftwatch.wire import openai
from driftwatch.wire.exchange import Exchange

FIGURES = {
    "windows": "num_spec_steps",
    "drafted": "total_draft_tokens",
    "accepted": "total_accepted_draft_tokens",
    "accepted_histogram": "acceptance_histogram",
    "gamma": "num_spec_tokens",
}

Json = dict[str, Any]


def record(exchange: Exchange) -> Record:
    """The record of an exchange, with ids and figures where there are any. Raises Skip."""
    parsed = openai.parse(exchange)
    values, ids = openai.with_ids(exchange, parsed)
    conversation = parsed.request.get("conversation_params")
    if values["session"] is None and isinstance(conversation, dict):
        session = conversation.get("conversation_id")
        values["session"] = session if isinstance(session, str) and session else None
    tokens = len(ids[1]) if ids else parsed.usage.get("completion_tokens")
    for choice in parsed.choices():
        values["engine"] = _figures(choice, tokens) or values.get("engine")
    return openai.build(values)


def _figures(choice: Json, tokens: object) -> Json | None:
    stats = choice.get("speculative_decoding")
    if isinstance(stats, dict):
        return counted(stats)
    return from_mean(choice.get("avg_decoded_tokens_per_iter"), tokens)


def counted(stats: Json) -> Json | None:
    """Counts as the engine gives them; without a draft there are none (versions before pull request 17082 gave 0)."""
    found = {ours: stats[theirs] for ours, theirs in FIGURES.items() if stats.get(theirs) is not None}
    return found if found.get("drafted") else None


def from_mean(mean: object, tokens: object) -> Json | None:
    """Windows and accepted drafts out of tokens per step, to within one window: the prefill token is none of theirs.

    A mean of 1 is no figure: engines that do not speculate give it too.
    """
    if type(tokens) is not int or tokens < 2 or type(mean) not in (int, float) or not 1.0 < float(mean) <= tokens:  # type: ignore[arg-type]
        return None
    judged = tokens - 1
    windows = min(judged, max(1, round(judged / float(mean))))  # type: ignore[arg-type]
    return {"windows": windows, "accepted": judged - windows}
