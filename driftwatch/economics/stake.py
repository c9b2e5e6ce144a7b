"""What is at stake when acceptance falls: what a day's tokens cost more now than they would as accepted before."""

from __future__ import annotations

import math

from driftwatch.economics.range import Range

MILLION = 1e6


def per_day(before: Range, now: Range, tokens: float) -> Range:
    """``tokens`` output tokens a day at two prices per million; positive where they are dearer now.

    The two prices come from different requests. Their difference has the limits that follow from those of each (the
    square-and-add of Zou and Donner 2008, Statistics in Medicine 27(10), 1693 to 1702): with price 1 now and price 2
    before, lower = d - sqrt((p1 - l1)^2 + (u2 - p2)^2), upper = d + sqrt((u1 - p1)^2 + (p2 - l2)^2). None where a price
    or a limit is.
    """
    if before.value is None or now.value is None:
        return Range()
    d, scale = now.value - before.value, tokens / MILLION
    if before.lower is None or before.upper is None or now.lower is None or now.upper is None:
        return Range(scale * d)
    below = math.hypot(now.value - now.lower, before.upper - before.value)
    above = math.hypot(now.upper - now.value, before.value - before.lower)
    return Range(scale * d, scale * (d - below), scale * (d + above))
