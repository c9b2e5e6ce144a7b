"""Cost per million output tokens: plain, with speculation, and plain on as many GPUs as the same latency takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from driftwatch.economics.profile import CostProfile
from driftwatch.economics.range import Range
from driftwatch.economics.value import Value

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Price:
    """In the currency of the price per GPU-hour, for decoding on an engine that is kept at its batch."""

    plain: float
    speculative: Range
    added: float | None
    """Plain decoding at the latency of speculation, by adding GPUs; None if no number of GPUs gets there."""
    replicas: float | None
    """Plain engines needed for the tokens and the latency of one speculative engine; at least 1."""
    batch: float
    plain_batch: float
    costs: str
    """Origin of the step times."""

    @property
    def saved(self) -> Range:
        """Share of the plain cost that speculation saves, negative where it costs more; latency not credited."""
        if not self.plain:  # what costs nothing saves nothing
            return Range()
        return self.speculative.map(lambda cost: 1.0 - cost / self.plain, falling=True)

    def to_json(self) -> dict[str, Any]:
        return {
            "plain": self.plain,
            "speculative": self.speculative.to_json(),
            "added_gpus": self.added,
            "replicas": self.replicas,
            "batch": self.batch,
            "plain_batch": self.plain_batch,
            "costs": self.costs,
        }


def per_million(token_s: float, batch: float, per_gpu_hour: float, gpus: int = 1) -> float:
    """Price of a million output tokens of an engine that decodes ``batch`` sequences at ``token_s`` a token each."""
    return 1e6 * per_gpu_hour * gpus / SECONDS_PER_HOUR * token_s / batch


def price(
    value: Value,
    profile: CostProfile,
    *,
    per_gpu_hour: float,
    gpus: int = 1,
    context: float | None = None,
) -> Price:
    """Cost per million tokens = 10^6 price gpus / (3600 tokens per second), tokens per second = B / f, with f the
    seconds per token of one request and B the mean number running.

    Both modes at the batch of ``value``, kept full: speculation then sells more tokens of the same GPU. At equal
    arrival rate, and on the same GPUs, the tokens and hence their cost are equal by definition and latency is the gain;
    it turns into money as the GPUs that plain decoding needs for the same latency. A plain engine reaches time per
    token tau only up to a batch B* with t(B*) = tau (at an arrival rate: t(1 + B*) = tau), so one speculative engine at
    batch B equals B / B* plain ones (Little's law: same tokens, same time per token). Below t(1) no number of replicas
    helps. More GPUs an engine is a profile of its own (:meth:`CostProfile.on_gpus`).
    """
    if not per_gpu_hour >= 0.0 or gpus < 1:
        raise ValueError(f"{per_gpu_hour} per GPU-hour on {gpus} GPUs is no price")
    load, u = value.at_rate, value.coverage
    batch = seen = plain_batch = plain_seen = max(value.cost.batch, 1.0)
    if load is not None and load.speculative.batch and load.speculative.seen and load.plain.batch and load.plain.seen:
        batch, seen = load.speculative.batch, load.speculative.seen
        plain_batch, plain_seen = load.plain.batch, load.plain.seen
    per_second = per_million(1.0, 1.0, per_gpu_hour, gpus)
    step = u * profile.window_s(seen, value.proposals, context) + (1.0 - u) * profile.plain_s(seen, context)

    def token_s(length: float) -> float:
        return step / (u * length + 1.0 - u)

    needed: float | None = None
    if value.length.value is not None:
        alike = _largest(profile, token_s(value.length.value), seen, context)
        # The batch seen exceeds the mean by the request itself, or by nothing where the batch is kept full.
        mean = None if alike is None else alike - (seen - batch)
        needed = None if mean is None or mean <= 0.0 else max(batch / mean, 1.0)
    if load is None or batch == seen:
        speculative = value.length.map(lambda length: per_second * token_s(length) / batch, falling=True)
    else:  # The rate says how many tokens there are, whatever the length.
        speculative = value.length.map(lambda length: per_second / (load.rate * load.tokens))
    return Price(
        plain=per_million(profile.plain_s(plain_seen, context), plain_batch, per_gpu_hour, gpus),
        speculative=speculative,
        added=None if needed is None or speculative.value is None else speculative.value * needed,
        replicas=needed,
        batch=batch,
        plain_batch=plain_batch,
        costs=profile.origin,
    )


def _largest(profile: CostProfile, token_s: float, most: float, context: float | None) -> float | None:
    """The largest batch from 1 to ``most`` whose plain step takes at most ``token_s``; None if not even one does."""
    if profile.plain_s(most, context) <= token_s:
        return most
    if profile.plain_s(1.0, context) > token_s:
        return None
    low, high = 1.0, most
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if profile.plain_s(middle, context) <= token_s else (low, middle)
    return low
