"""The report: four sections and a verdict for all requests and for each segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from driftwatch.economics.price import Price
from driftwatch.economics.profile import CostProfile
from driftwatch.economics.sizing import Room, room
from driftwatch.economics.verdict import LEAST_GAIN, Verdict, of_measured
from driftwatch.evaluate.baseline import Baseline, Conditions, baseline
from driftwatch.evaluate.candidate import Candidate, Draft, judge
from driftwatch.evaluate.request import Request, by_segment
from driftwatch.evaluate.wallclock import WallClock, measured, predicted

SUPPOSED_COST = 0.1
"""Of a draft that does not exist yet, in plain steps a proposal."""


@dataclass(frozen=True)
class Segment:
    name: str
    baseline: Baseline
    candidates: tuple[Candidate, ...]
    """The trained draft first, where there is one; then what needs no training."""
    wall: WallClock | None
    room: Room | None
    """What any draft could give here, and how good it would have to be."""
    verdict: Verdict

    @property
    def about(self) -> str | None:
        """What the verdict speaks of; None where nothing was judged."""
        if self.wall is not None and self.wall.source == "measured":
            return "the engine's own speculation"
        return None if self.subject is None else self.subject.draft.name

    @property
    def price(self) -> Price | None:
        """Of what section 3 is about: of measured times where there are any, and then without GPUs added, since what a
        plain engine takes at other batches was not measured."""
        base, wall = self.baseline, self.wall
        if wall is None or wall.source != "measured":
            return None if self.subject is None else self.subject.price
        if base.per_million is None or base.batch is None:
            return None
        plain = base.per_million
        speculative = wall.speedup.map(lambda times: plain / times if times else None, falling=True)
        return Price(plain, speculative, None, None, base.batch, base.batch, "measured")

    @property
    def subject(self) -> Candidate | None:
        """What is predicted of: the trained draft, else the best that needs no training. Sections 3 and 4 and the
        verdict are about it, unless engines were measured."""
        if self.candidates and self.candidates[0].draft.kind == "trained":
            return self.candidates[0]
        known = [one for one in self.candidates if one.shown is not None and one.shown.judged.value is not None]
        return max(known, key=_speedup, default=next(iter(self.candidates), None))

    @property
    def untrained(self) -> str | None:
        """Said where something that needs no training does as well as the trained draft, and pays."""
        subject = self.subject
        if subject is None or subject.draft.kind != "trained":
            return None
        least = max(1.0, _speedup(subject) * (1.0 - LEAST_GAIN))
        for other in self.candidates[1:]:
            if other.verdict is not None and other.verdict.gamma is not None and _speedup(other) >= least:
                return (
                    f"you would do as well without a trained draft here: {other.draft.name} is predicted to give "
                    f"{_speedup(other):.2f}, the trained draft {_speedup(subject):.2f}"
                )
        return None

    @property
    def would_change(self) -> tuple[str, ...]:
        """What would change the verdict, in words."""
        found, now = [], self.verdict
        if (flip := now.flip) is not None:
            side = "below" if flip.length_now >= flip.length else "above"
            found.append(
                f"an acceptance length {side} {flip.length:.2f} at gamma {flip.gamma} (now {flip.length_now:.2f})"
            )
            if flip.hit_rate is None:
                found.append("no hit rate reaches that: only a cheaper draft or verification would")
            elif flip.hit_rate_now is not None:
                found.append(f"that is a hit rate of {flip.hit_rate:.2f} (now {flip.hit_rate_now:.2f})")
            if flip.batch is not None and self.baseline.batch is not None:
                found.append(f"a batch of {flip.batch:.1f} instead of {self.baseline.batch:.3g}")
        if now.requests_needed is not None:
            found.append(f"about {now.requests_needed} requests in the sample")
        if self.subject is None and self.room is not None and (easiest := self.room.easiest) is not None:
            found.append(f"a draft with a hit rate above {easiest.hit_rate or 0.0:.2f} at gamma {easiest.gamma}")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        return {
            "segment": self.name,
            "baseline": self.baseline.to_json(),
            "acceptance": [one.to_json() for one in self.candidates],
            "wall_clock": None if self.wall is None else self.wall.to_json(),
            "cost": None if self.price is None else self.price.to_json(),
            "room": None if self.room is None else self.room.to_json(),
            "verdict": self.verdict.to_json() | {"about": self.about},
            "would_change": list(self.would_change),
            "untrained": self.untrained,
        }


@dataclass(frozen=True)
class Report:
    conditions: Conditions
    profile: CostProfile | None
    segments: tuple[Segment, ...]
    """All requests first."""
    skipped: Mapping[str, Mapping[str, int]]
    """By draft: records that it could not judge, by reason."""
    notes: tuple[str, ...] = ()
    """What else a reader should know: requests not sent, figures that were run on a share."""

    def to_json(self) -> dict[str, Any]:
        profile = self.profile
        costs = None
        if profile is not None:
            error = None if profile.error is None else asdict(profile.error)
            bound = asdict(profile.bound)
            costs = {"origin": profile.origin, "bound": bound, "priced_as": str(profile.shape), "error": error}
        return {
            "conditions": asdict(self.conditions),
            "costs": costs,
            "segments": [one.to_json() for one in self.segments],
            "skipped": {name: dict(reasons) for name, reasons in self.skipped.items()},
            "notes": list(self.notes),
        }


def report(
    requests: Sequence[Request],
    drafts: Sequence[Draft],
    profile: CostProfile | None,
    at: Conditions,
    *,
    skipped: Mapping[str, Mapping[str, int]] | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """``drafts`` in order: the trained one, if there is one, first."""
    segments = [_segment(name, part, drafts, profile, at) for name, part in by_segment(requests).items()]
    return Report(at, profile, tuple(segments), skipped or {}, tuple(notes))


def _segment(
    name: str, requests: Sequence[Request], drafts: Sequence[Draft], profile: CostProfile | None, at: Conditions
) -> Segment:
    base = baseline(requests, profile, at)
    candidates = tuple(found for draft in drafts if (found := judge(draft, requests, at)) is not None)
    wall = measured(requests, at.gamma)
    possible = None
    if profile is not None:
        sized = profile if profile.draft is not None else profile.with_draft(SUPPOSED_COST)
        possible = room(
            sized, batch=base.batch or at.batch, prefill_share=base.prefill_share or 0.0, context=base.context
        )
    # Which candidate the verdict is about is a property of the segment itself.
    draft = Segment(name, base, candidates, wall, possible, Verdict("not_enough_data", None, (), 0.0))
    subject = draft.subject
    if wall is None and subject is not None:
        wall = predicted(subject, requests, base.prefill_share)
    return Segment(name, base, candidates, wall, possible, _verdict(subject, wall, possible, at))


def _verdict(subject: Candidate | None, wall: WallClock | None, possible: Room | None, at: Conditions) -> Verdict:
    """Of measured times where there are any, else of the replay and the profile, else of the room there is."""
    predicted_one = None if subject is None else subject.verdict
    if wall is not None and wall.source == "measured":
        slower = "p99 of the time per token gets worse" if wall.p99 == "worse" else None
        # What an engine drafts with is known where its draft was given: of prompt lookup a flip says nothing.
        trained = subject is not None and subject.draft.kind == "trained"
        return of_measured(
            wall.speedup,
            gamma=at.gamma,
            requests=wall.requests,
            flip=predicted_one.flip if trained and predicted_one is not None else None,
            warnings=() if slower is None else (slower,),
        )
    if predicted_one is not None:
        return predicted_one
    if subject is not None and possible is not None:
        return Verdict("not_enough_data", None, (f"the costs given are none of {subject.draft.name}",), 0.0)
    if possible is not None and possible.easiest is None:
        reason = "not even a draft whose every proposal is accepted would pay at this batch"
        return Verdict("do_not_use", None, (reason,), 0.0)
    if possible is None:
        missing = "what a step costs is unknown: give --profile, or the URLs of engines"
        return Verdict("not_enough_data", None, (missing,), 0.0)
    return Verdict("not_enough_data", None, ("no draft was judged",), 0.0)


def _speedup(one: Candidate) -> float:
    return 0.0 if one.shown is None or one.shown.judged.value is None else one.shown.judged.value
