"""Replaying recorded history: many records, one draft, figures for all of them and by label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from driftwatch.acceptance import Rule, Weights, accepted_per_window, tally, tidy
from driftwatch.drift.sums import Sums
from driftwatch.records import Record
from driftwatch.shadow.agreement import Agreement
from driftwatch.shadow.draft import Draft, Tokens
from driftwatch.shadow.replay import replay
from driftwatch.shadow.tokenizer import Retokeniser

CHUNK = 1024
"""Records held at a time: enough to sort by length, little enough for any file."""


@dataclass(frozen=True)
class Outcome:
    """One record and what came of it."""

    record: Record
    weights: Weights | None
    skipped: str | None
    agreement: Agreement | None = None


def replay_records(
    draft: Draft, records: Iterable[Record], *, batch_tokens: int, tokenizer: Retokeniser | None = None
) -> Iterator[Outcome]:
    """One outcome for each record, in order."""
    remaining = iter(records)
    while chunk := list(islice(remaining, CHUNK)):
        found = [_tokens(record, tokenizer) for record in chunk]
        known = [i for i, tokens in enumerate(found) if isinstance(tokens, Tokens)]
        samples = [tokens for tokens in found if isinstance(tokens, Tokens)]
        outcomes = {i: Outcome(chunk[i], None, reason) for i, reason in enumerate(found) if isinstance(reason, str)}
        for result in replay(draft, samples, batch_tokens=batch_tokens):
            i = known[result.index]
            outcomes[i] = Outcome(chunk[i], result.weights, result.skipped, result.agreement)
        yield from (outcomes[i] for i in range(len(chunk)))


def _tokens(record: Record, tokenizer: Retokeniser | None) -> Tokens | str:
    """The record's tokens with its sampling settings, or why there are none."""
    if record.prompt_token_ids and record.output_token_ids:
        found: Tokens | None = Tokens(record.prompt_token_ids, record.output_token_ids)
    elif tokenizer is None:
        return "no_tokenizer"
    else:
        text = record.model_dump(include={"messages", "prompt", "output"}, exclude_none=True)
        found = tokenizer.tokens(text)
    if found is None:
        return "template_refused"
    return replace(found, temperature=record.temperature, top_p=record.top_p, top_k=record.top_k)


@dataclass
class Summary:
    """Figures over all outcomes so far, as `driftwatch replay --json` prints them."""

    rule: Rule
    gamma: int
    by: Sequence[str] = ()
    output_tokens: int = 0
    total: Sums = field(init=False)
    groups: dict[str, dict[str, Sums]] = field(init=False)
    skipped: Counter[str] = field(default_factory=Counter)
    agreement: Agreement | None = None

    def __post_init__(self) -> None:
        self.total = Sums.zero(self.gamma)
        self.groups = {label: {} for label in self.by}

    def add(self, outcome: Outcome) -> None:
        if outcome.weights is None:
            self.skipped[outcome.skipped or "unknown"] += 1
            return
        sums = Sums.request(tally(outcome.weights, self.gamma))
        self.output_tokens += outcome.weights.tokens + 1
        self.total += sums
        if outcome.agreement is not None:
            self.agreement = outcome.agreement + self.agreement if self.agreement else outcome.agreement
        for label, values in self.groups.items():
            value = outcome.record.labels.get(label, "none")
            values[value] = values.get(value, Sums.zero(self.gamma)) + sums

    def as_dict(self, draft: Draft) -> dict[str, Any]:
        report: dict[str, Any] = {
            "requests": self.total.requests,
            "output_tokens": self.output_tokens,
            "rule": self.rule,
            "draft": draft.fingerprint.as_dict(),
            "gamma": _figures(self.total),
            "skipped": dict(self.skipped),
        }
        if self.agreement is not None:
            report["agreement"] = self.agreement.as_dict()
        if self.by:
            report["by"] = {
                label: {
                    value: {"requests": sums.requests, "gamma": _figures(sums)}
                    for value, sums in sorted(values.items())
                }
                for label, values in self.groups.items()
            }
        return report


def _figures(sums: Sums) -> dict[str, Any]:
    """Counts and ratios for each gamma, the hit rate with its interval between requests."""
    found = {}
    for gamma in range(1, sums.gammas + 1):
        hit = sums.interval("hit_rate", gamma)
        interval = {"hit_rate_lower": hit.lower, "hit_rate_upper": hit.upper}
        found[str(gamma)] = sums.tally.figures(gamma) | interval
    return found


def per_request(outcome: Outcome, rule: Rule, gamma: int) -> dict[str, Any]:
    """One line of --per-request: what ``backtest`` reads."""
    weights = outcome.weights
    assert weights is not None
    counts = tally(weights, gamma)
    figures: dict[str, Any] = {}
    for g in range(1, gamma + 1):
        i = g - 1
        numbers = {"steps": counts.steps, "windows": counts.windows, "drafted": counts.drafted}
        numbers |= {"accepted": counts.accepted, "rejected": counts.rejected}
        figures[str(g)] = {name: tidy(values[i]) for name, values in numbers.items()}
        if rule == "argmax":
            figures[str(g)]["accepted_per_window"] = accepted_per_window(weights, g)
    record = outcome.record
    line: dict[str, Any] = {
        "id": record.id,
        "labels": record.labels,
        "output_tokens": weights.tokens + 1,
        "gamma": figures,
    }
    if outcome.agreement is not None:
        line["agreement"] = outcome.agreement.as_dict()
    if record.ts is not None:
        line["ts"] = record.ts.isoformat()
    if record.session is not None:
        line["session"] = record.session
    return line
