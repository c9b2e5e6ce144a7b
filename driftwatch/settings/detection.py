"""Sections about judgement: baselines, tests, canaries, value, limits on latency."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import (
    Field,
    model_validator,
)

from driftwatch.settings.values import Section


class Baseline(Section):
    mode: Literal["auto", "value"] = Field("auto", description="`auto` learns from the cell's own first requests.")
    value: float | None = Field(None, gt=0, lt=1, description="Given hit rate, for mode `value`.")
    min_requests: int = Field(500, ge=10, description="Requests a cell needs before its baseline is frozen.")
    min_hours: float = Field(24.0, ge=0, description="Hours a cell needs before its baseline is frozen.")

    @model_validator(mode="after")
    def _value_for_mode(self) -> Self:
        if (self.mode == "value") != (self.value is not None):
            raise ValueError("mode 'value' and the key 'value' belong together")
        return self


class Detect(Section):
    baseline: Baseline = Field(Baseline(), description="Where the normal hit rate of a cell comes from.")
    tolerance: float = Field(0.03, gt=0, lt=1, description="Fall of the hit rate, absolute, that is no drift yet.")
    requests_between_false_alarms: float = Field(
        100_000, ge=10, description="At most one false alarm in this many sampled requests, over all cells and tests."
    )
    two_sided: bool = Field(False, description="Alarm on a hit rate above normal too: repetition is easy to draft.")


class Canary(Section):
    prompts: Path | None = Field(
        None, description="File of 10 to 50 prompts, one a line, asked greedily of the engine; none: no canaries."
    )
    interval_minutes: float = Field(60.0, gt=0, description="Minutes between two rounds of canary prompts.")


class Value(Section):
    """What decoding costs."""

    gpu_hour_price: float | None = Field(
        None, gt=0, description="Price of one GPU-hour, in any currency; none: no cost per token is told."
    )
    gpus: int = Field(1, ge=1, description="GPUs of one engine, as in the cost profile.")


class Slo(Section):
    """Limits of what users wait for."""

    ttft_s: float | None = Field(
        None, gt=0, description="Seconds to the first token that `slo.share` of requests may exceed; none: not judged."
    )
    tpot_s: float | None = Field(
        None, gt=0, description="Seconds per output token that `slo.share` of requests may exceed; none: not judged."
    )
    share: float = Field(0.01, gt=0, lt=0.06, description="Share of requests that may be over a limit: 0.01 is a p99.")
