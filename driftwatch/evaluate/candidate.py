"""Section 2: how much of one draft was accepted on one segment, what that is worth, and whether to stop here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from driftwatch.drift.interval import Estimate
from driftwatch.drift.sums import Figure, Sums
from driftwatch.economics.price import Price, price
from driftwatch.economics.profile import CostProfile
from driftwatch.economics.range import Range
from driftwatch.economics.tail import Tail, of_tallies
from driftwatch.economics.value import Value, best, of_sums
from driftwatch.economics.verdict import Verdict, verdict
from driftwatch.evaluate.baseline import Conditions, mean, settled
from driftwatch.evaluate.request import Request, sums_of

Kind = Literal["trained", "ngram", "lookahead"]
FIGURES: tuple[Figure, ...] = ("acceptance_length", "hit_rate", "acceptance_rate", "steps_per_token")


@dataclass(frozen=True)
class Draft:
    """What proposes, and what it costs."""

    name: str
    kind: Kind
    profile: CostProfile | None
    fed_per_step: float | None = None
    """Of lookahead: tokens through the target at every step; its own window takes the place of a draft."""
    chosen: int | None = None
    """Of lookahead: records that it was run on, the others were not tried."""


@dataclass(frozen=True)
class Candidate:
    """One draft on one segment."""

    draft: Draft
    requests: int
    figures: Mapping[int, Mapping[Figure, Estimate]] = field(default_factory=dict)
    """By proposal length, those that were walked."""
    values: tuple[Value, ...] = ()
    """Empty where costs are unknown."""
    verdict: Verdict | None = None
    shown: Value | None = None
    """The proposal length that the other sections are about: what the verdict names, else the best."""
    tail: Tail | None = None
    price: Price | None = None

    @property
    def stop(self) -> str | None:
        """Why to stop here: at every proposal length even the upper limit stays under break-even, by more than the
        costs may be wrong."""
        if self.verdict is None or self.verdict.decision != "do_not_use":
            return None
        top = best([value for value in self.values if not value.outside])
        if top is None or top.length.value is None or top.length.upper is None:
            return None
        return (
            f"acceptance is too low to pay at any proposal length: at gamma {top.gamma}, the best, a window gives "
            f"{top.length.value:.2f} tokens (at most {top.length.upper:.2f}) and costs {top.break_even:.2f} plain steps"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "draft": self.draft.name,
            "kind": self.draft.kind,
            "how": "run" if self.draft.kind == "lookahead" else "replayed",
            "requests": self.requests,
            "gamma": {
                str(gamma): {name: [found.value, found.lower, found.upper] for name, found in figures.items()}
                for gamma, figures in self.figures.items()
            },
            "values": [value.to_json() for value in self.values],
            "stop": self.stop,
            "verdict": None if self.verdict is None else self.verdict.to_json(),
            "tail": None if self.tail is None else self.tail.to_json(),
            "price": None if self.price is None else self.price.to_json(),
        }


def judge(draft: Draft, requests: Sequence[Request], at: Conditions) -> Candidate | None:
    """None where the draft judged no request of these."""
    judged = [one for one in requests if draft.name in one.tallies]
    sums = sums_of(judged, draft.name)
    if sums is None:
        return None
    figures = {
        gamma: {name: sums.interval(name, gamma) for name in FIGURES}
        for gamma in range(1, sums.gammas + 1)
        if sums.total("windows", gamma) > 0.0
    }
    if draft.profile is None:
        return Candidate(draft, len(judged), figures)
    values = _values(draft, draft.profile, sums, judged, at)
    gamma = at.gamma if draft.kind != "lookahead" else sums.gammas
    first = verdict(values, draft.profile, gamma=gamma)
    named = next((value for value in values if value.gamma == first.gamma), None) or best(values)
    if named is None:
        return Candidate(draft, len(judged), figures, tuple(values), first)
    tail = of_tallies([one.tallies[draft.name] for one in judged], named, weights=[one.weight for one in judged])
    final = verdict(values, draft.profile, gamma=gamma, tail=tail, slower_limit=at.slower_limit)
    cost = None
    if at.per_gpu_hour is not None:
        context = named.cost.context
        cost = price(named, draft.profile, per_gpu_hour=at.per_gpu_hour, gpus=at.gpus, context=context)
    return Candidate(draft, len(judged), figures, tuple(values), final, named, tail, cost)


def _values(draft: Draft, profile: CostProfile, sums: Sums, requests: Sequence[Request], at: Conditions) -> list[Value]:
    """At a rate break-even is at the batch of plain decoding: where both ways take as long, they settle at the same."""
    context, batch = mean(requests, lambda one: one.context), at.batch
    if at.rate is not None:
        batch = settled(requests, profile, at.rate, context).seen or batch
    if draft.kind == "lookahead" and draft.fed_per_step is not None:
        values = _lookahead(profile, sums, draft.fed_per_step, batch, context)
    else:
        values = of_sums(sums, profile, batch=batch, context=context)
    if at.rate is None:
        return values
    tokens = mean(requests, lambda one: one.tokens)
    return [value.under(profile, rate=at.rate, tokens=tokens, context=context) for value in values]


def _lookahead(profile: CostProfile, sums: Sums, fed: float, batch: float, context: float) -> list[Value]:
    """Every step feeds the whole tree, whether an n-gram is tried or not: steps are what counts, not windows."""
    gamma = sums.gammas
    steps = sums.interval("steps_per_token", gamma)
    if steps.value is None:
        return []
    length = Range.of(steps).map(lambda share: 1.0 / share, falling=True)
    cost = profile.cost(batch, max(fed - 1.0, 0.0), context)
    return [Value(gamma, length, cost, 1.0, steps.requests, Range.of(steps))]
