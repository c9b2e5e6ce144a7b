"""Replaying recorded history: many records, one draft, figures for all of them and by label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from driftwatch.acceptance import Rule, Tally, Weights, accepted_per_window, tally, tidy
from driftwatch.drift.sums import Sums
from driftwatch.records import Record
from driftwatch.shadow.agreement import Agreement
from driftwatch.shadow.draft import Draft, Fingerprinted, Tokens
from driftwatch.shadow.eagle3.rollout import Eagle3TreeDraft
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
    retokenised: bool = False
    """Judged on ids that were made again from text, which need not be the served ones: never pooled with exact ones."""


def replay_records(
    draft: Draft, records: Iterable[Record], *, batch_tokens: int, tokenizer: Retokeniser | None = None
) -> Iterator[Outcome]:
    """One outcome for each record, in order."""
    for chunk in chunks(records):
        yield from replay_chunk(draft, chunk, batch_tokens=batch_tokens, tokenizer=tokenizer)


def chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    """The records in lists of ``CHUNK``, the last one shorter."""
    remaining = iter(records)
    while chunk := list(islice(remaining, CHUNK)):
        yield chunk


def replay_chunk(
    draft: Draft, chunk: Sequence[Record], *, batch_tokens: int, tokenizer: Retokeniser | None = None
) -> list[Outcome]:
    """One outcome for each record, in order; batches never reach from one chunk into another."""
    found = [tokens_of(record, tokenizer) for record in chunk]
    known = [i for i, tokens in enumerate(found) if isinstance(tokens, Tokens)]
    samples = [tokens for tokens in found if isinstance(tokens, Tokens)]
    outcomes = {i: Outcome(chunk[i], None, reason) for i, reason in enumerate(found) if isinstance(reason, str)}
    for result in replay(draft, samples, batch_tokens=batch_tokens):
        i = known[result.index]
        again = not chunk[i].has_ids
        outcomes[i] = Outcome(chunk[i], result.weights, result.skipped, result.agreement, again)
    return [outcomes[i] for i in range(len(chunk))]


def tokens_of(record: Record, tokenizer: Retokeniser | None) -> Tokens | str:
    """The record's tokens with its sampling settings, or why there are none."""
    if record.prompt_token_ids and record.output_token_ids:
        found: Tokens | None = Tokens(record.prompt_token_ids, record.output_token_ids)
    elif record.is_empty:
        return "too_short"
    elif tokenizer is None:
        return "no_tokenizer"
    else:
        text = record.model_dump(include={"messages", "prompt", "output"}, exclude_none=True)
        found = tokenizer.tokens(text)
    if found is None:
        return "template_refused"
    return replace(found, temperature=record.temperature, top_p=record.top_p, top_k=record.top_k)


@dataclass
class Part:
    """Counts of some requests; those of a session are one unit, wherever in the files they stand."""

    gamma: int
    output_tokens: int = 0
    alone: Sums = field(init=False)
    sessions: dict[str, Tally] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.alone = Sums.zero(self.gamma)

    def add(self, counts: Tally, session: str | None) -> None:
        self.output_tokens += counts.tokens + 1
        if session is None:
            self.alone += Sums.request(counts)
        else:
            known = self.sessions.get(session)
            self.sessions[session] = counts if known is None else known + counts

    @property
    def sums(self) -> Sums:
        return sum((Sums.request(counts) for counts in self.sessions.values()), self.alone)

    def as_dict(self) -> dict[str, Any]:
        sums = self.sums
        return {"requests": sums.requests, "output_tokens": self.output_tokens, "gamma": _figures(sums)}


@dataclass
class Report:
    """Figures of some requests, all together and by the values of labels."""

    gamma: int
    by: Sequence[str]
    total: Part = field(init=False)
    groups: dict[str, dict[str, Part]] = field(init=False)
    agreement: Agreement | None = None

    def __post_init__(self) -> None:
        self.total = Part(self.gamma)
        self.groups = {label: {} for label in self.by}

    def add(self, outcome: Outcome, weights: Weights) -> None:
        counts, record = tally(weights, self.gamma), outcome.record
        self.total.add(counts, record.session)
        for label, values in self.groups.items():
            value = record.labels.get(label, "none")
            values.setdefault(value, Part(self.gamma)).add(counts, record.session)
        if outcome.agreement is not None:
            self.agreement = outcome.agreement + self.agreement if self.agreement else outcome.agreement

    def as_dict(self) -> dict[str, Any]:
        report = self.total.as_dict()
        if self.agreement is not None:
            report["agreement"] = self.agreement.as_dict()
        if self.by:
            report["by"] = {
                label: {value: part.as_dict() for value, part in sorted(values.items())}
                for label, values in self.groups.items()
            }
        return report


@dataclass
class Summary:
    """Figures over all outcomes so far, as `driftwatch replay --json` prints them.

    What was judged on ids made from text stands apart, as ``retokenised``; where no request came with ids, the report
    itself is of those.
    """

    rule: Rule
    gamma: int
    by: Sequence[str] = ()
    served: Report = field(init=False)
    retokenised: Report = field(init=False)
    skipped: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.served, self.retokenised = Report(self.gamma, self.by), Report(self.gamma, self.by)

    def add(self, outcome: Outcome) -> None:
        if outcome.weights is None:
            self.skipped[outcome.skipped or "unknown"] += 1
        else:
            report = self.retokenised if outcome.retokenised else self.served
            report.add(outcome, outcome.weights)

    @property
    def leading(self) -> Report:
        """What the report itself is of."""
        return self.served if self.served.total.output_tokens else self.retokenised

    def as_dict(self, draft: Fingerprinted) -> dict[str, Any]:
        found = self.leading.as_dict()
        report: dict[str, Any] = {
            "requests": found.pop("requests"),
            "output_tokens": found.pop("output_tokens"),
            "rule": self.rule,
            "draft": draft.fingerprint.as_dict(),
            "gamma": found.pop("gamma"),
            "skipped": dict(self.skipped),
        }
        if isinstance(draft, Eagle3TreeDraft):
            report["cost"] = draft.cost.as_dict()
        if self.retokenised.total.output_tokens:
            report["retokenised"] = self.retokenised.as_dict()
        return report | found


def _figures(sums: Sums) -> dict[str, Any]:
    """Counts and ratios for each gamma, hit rate and steps per token with their interval between requests."""
    found = {}
    for gamma in sums.tally.replayed:
        hit = sums.interval("hit_rate", gamma)
        steps = sums.interval("steps_per_token", gamma)
        interval = {"hit_rate_lower": hit.lower, "hit_rate_upper": hit.upper, "steps_per_token": steps.value}
        interval |= {"steps_per_token_lower": steps.lower, "steps_per_token_upper": steps.upper}
        found[str(gamma)] = sums.tally.figures(gamma) | interval
    return found


def per_request(outcome: Outcome, rule: Rule, gamma: int) -> dict[str, Any]:
    """One line of --per-request: what ``backtest`` reads."""
    weights = outcome.weights
    assert weights is not None
    counts = tally(weights, gamma)
    figures: dict[str, Any] = {}
    for g in counts.replayed:
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
    if outcome.retokenised:
        line["retokenised"] = True
    if record.ts is not None:
        line["ts"] = record.ts.isoformat()
    if record.session is not None:
        line["session"] = record.session
    return line
