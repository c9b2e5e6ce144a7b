"""Before there is a draft: is there room for a gain, and how good would a draft have to be? What would tip the scale?

Hit rates here are those of independent hits: every tested proposal is accepted with the same probability a, whatever
came before. Real hits cluster, and clustered hits of the same rate give shorter windows than this formula: at gamma 4,
half of the windows all right and half all wrong make a hit rate of .80 and a length of 3.00, not 3.36. So the hit rate
named here is a little too low. Acceptance lengths need no such model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from driftwatch.economics.profile import CostProfile
from driftwatch.economics.value import end_to_end, speedup


def length_at(hit_rate: float, gamma: float) -> float:
    """Acceptance length of independent hits: 1 + a + ... + a^gamma = (1 - a^(gamma + 1)) / (1 - a)."""
    if not 0.0 <= hit_rate <= 1.0:
        raise ValueError(f"a hit rate lies between 0 and 1, not at {hit_rate}")
    if hit_rate == 1.0:
        return 1.0 + gamma
    # Near 1 the difference of powers cancels; expm1 does not.
    power = 0.0 if hit_rate == 0.0 else math.exp((gamma + 1.0) * math.log(hit_rate))
    if hit_rate > 0.9:
        return math.expm1((gamma + 1.0) * math.log(hit_rate)) / -(1.0 - hit_rate)
    return (1.0 - power) / (1.0 - hit_rate)


def hit_rate_for(length: float, gamma: float) -> float | None:
    """Inverse of :func:`length_at`, which rises with the hit rate; None where no hit rate gives that length."""
    if length > (1.0 + gamma) * (1.0 + 1e-12):
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if length_at(middle, gamma) < length else (low, middle)
    return high if length > 1.0 else 0.0


@dataclass(frozen=True)
class Need:
    """What one proposal length asks of a draft."""

    gamma: int
    break_even: float
    """Acceptance length."""
    hit_rate: float | None
    """At break-even, independent hits; None: not even a draft that is always right pays."""
    hit_rate_for_gain: float | None
    """For the wanted end-to-end speedup."""
    ceiling: float
    """Decode speedup if every proposal were accepted: (gamma + 1) / (gamma c + v)."""


@dataclass(frozen=True)
class Room:
    """The most that speculation could give a segment."""

    batch: float
    decode_share: float
    """Of a plain request's time."""
    free_ceiling: float
    """End to end, if decoding took no time at all: 1 / prefill share; infinite without prefill."""
    ceiling: float
    """End to end with this draft cost, every proposal accepted, at the best proposal length."""
    needs: tuple[Need, ...]
    costs: str
    """Origin of the step times."""
    outside: tuple[str, ...]

    @property
    def easiest(self) -> Need | None:
        """The proposal length that pays at the lowest hit rate; None: none pays, there is no room."""
        possible = [need for need in self.needs if need.hit_rate is not None]
        return min(possible, key=lambda need: (need.hit_rate, need.gamma)) if possible else None

    def to_json(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "decode_share": self.decode_share,
            "free_ceiling": self.free_ceiling if math.isfinite(self.free_ceiling) else None,
            "ceiling": self.ceiling,
            "needs": [vars(need) for need in self.needs],
            "costs": self.costs,
            "outside": list(self.outside),
        }


def room(
    profile: CostProfile,
    *,
    batch: float,
    prefill_share: float,
    wanted: float = 1.1,
    gammas: Iterable[int] = range(1, 9),
    context: float | None = None,
) -> Room:
    """Ceilings and needs; a profile without a draft is first given a supposed one (:meth:`CostProfile.with_draft`).

    ``wanted`` is the end-to-end speedup at which somebody would bother. A tree has one proposal length, its steps.
    """
    if profile.shape.kind == "tree":
        gammas = [profile.shape.steps]
    free = math.inf if prefill_share == 0.0 else 1.0 / prefill_share
    needs: list[Need] = []
    outside: list[str] = []
    for gamma in gammas:
        cost = profile.cost(batch, gamma, context)
        outside += cost.outside
        # Amdahl the other way round: the decode speedup that makes the wanted one end to end.
        decode = (1.0 - prefill_share) / (1.0 / wanted - prefill_share) if free > wanted else None
        needs.append(
            Need(
                gamma,
                cost.window,
                hit_rate_for(cost.window, gamma),
                None if decode is None else hit_rate_for(decode * cost.window, gamma),
                speedup(1.0 + gamma, cost.window),
            )
        )
    top = max(need.ceiling for need in needs)
    ceiling = end_to_end(max(top, 1.0), prefill_share)  # nobody is made to speculate
    return Room(batch, 1.0 - prefill_share, free, ceiling, tuple(needs), profile.origin, tuple(dict.fromkeys(outside)))


def flip_batch(
    profile: CostProfile, length: float, *, gamma: float, batch: float, context: float | None = None
) -> float | None:
    """The batch nearest to ``batch``, on a ratio scale, at which an unchanged acceptance length stops, or starts, to
    pay; None where it never does inside the measured batches (1 to 1,024 for an entered profile).

    Break-even need not be monotone in the batch: c falls where a small draft hides its floor, v rises, and long
    contexts outweigh both in the end. But length t(B) - w(B) is linear between the few batches at which a step time has
    its kink, so each piece is solved exactly.
    """
    low, high = profile.batches or (1.0, 1024.0)
    target, draft = profile.target, profile.drafting
    kinks = {target.knee, target.knee / (1.0 + profile.shape.verified(gamma)), draft.knee}
    corners = sorted({low, high, *(kink for kink in kinks if low < kink < high)})

    def over(at: float) -> float:
        return length * profile.plain_s(at, context) - profile.window_s(at, gamma, context)

    found = []
    for left, right in pairwise(corners):
        a, b = over(left), over(right)
        if (a > 0.0) != (b > 0.0):
            found.append(left + (right - left) * a / (a - b))
    return min(found, key=lambda at: abs(math.log(at / max(batch, 1.0)))) if found else None
