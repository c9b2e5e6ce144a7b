"""Sections about what follows an alarm: webhooks, the policy, training data, the gate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    model_validator,
)

from driftwatch.settings.values import Section, Url


class Delivery(Section):
    """Where webhooks may go."""

    hosts: list[str] = Field([], description="Hosts that webhooks may be sent to, patterns allowed; empty: any.")


class Webhook(Section):
    name: str = Field(min_length=1, description="Name of the endpoint.")
    url: Url = Field(description="Where events are posted.")
    secrets: list[SecretStr] = Field([], description="Standard Webhooks secrets (`whsec_...`); all sign, for rotation.")
    secrets_file: Path | None = Field(None, description="File with one secret a line.")
    events: list[str] = Field(["*"], description="Event types delivered; `*` for all.")
    preset: Literal["plain", "argo", "github"] = Field(
        "plain",
        description="Shape: `plain` a CloudEvent, `argo` one with its attributes in headers too, `github` a "
        "`repository_dispatch`.",
    )
    token: SecretStr | None = Field(None, min_length=1, description="Bearer token sent to the endpoint.")
    token_file: Path | None = Field(None, description="File holding that token.")
    headers: dict[str, SecretStr] = Field({}, description="Further headers of each request.")
    template: Path | None = Field(
        None, description="File with the body to send instead, JSON: `${data.retrain_id}` stands for that value."
    )

    @model_validator(mode="after")
    def _one_body(self) -> Self:
        if self.template is not None and self.preset != "plain":
            raise ValueError(f"{self.name!r} has a template and the preset {self.preset}: give one")
        return self


Answer = Literal["retrain", "redistil", "none"]
"""What an alarm of some cause asks for: training on what was served, on answers generated anew, or nothing."""


class Policy(Section):
    """When an alarm becomes a request to retrain. Whatever is asked here and not fulfilled is stored as a reason."""

    splits: list[Literal["on", "off", "none"]] = Field(
        ["on", "off", "none"], description="Splits whose alarms may ask for training."
    )
    segments: list[str] = Field(
        ["*"], description="Patterns of segment ids whose alarms may ask, for example `tenant=a*`."
    )
    causes: dict[str, Answer] = Field(
        {"traffic": "retrain", "concept": "retrain", "target": "redistil"},
        description="What each cause asks for: `retrain`, `redistil` (on answers generated anew) or `none`. A cause "
        "that is not listed asks for nothing, an unknown one for what the event recommends.",
    )
    min_fall: float = Field(0.0, ge=0, lt=1, description="Least fall of the watched figure below its baseline.")
    min_samples: int = Field(1, ge=1, description="Samples that training data must hold; a request waits for them.")
    min_value_per_day: float | None = Field(
        None, gt=0, description="Least expected gain a day, in the currency of the prices; none: not asked."
    )
    quiet_hours: str | None = Field(
        None,
        pattern=r"^([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d$",
        description="Time of day (UTC) in which nothing is asked for, `22:00-06:00`; a request waits for its end.",
    )
    dry_run: bool = Field(False, description="Decide and store the decision, but ask for nothing.")


class TrainingData(Section):
    """What goes into an export."""

    max_rows: int = Field(20_000, ge=1, description="Requests of one export at most.")
    max_tokens: int = Field(50_000_000, ge=1, description="Tokens of one export at most.")
    low_share: float = Field(
        0.2, ge=0, le=1, description="Share of the rows for the requests that the draft does worst on, of any segment."
    )
    replay_share: float = Field(
        0.2, ge=0, le=1, description="Share of the rows for requests from before the change, against forgetting."
    )
    eval_share: float = Field(0.05, ge=0, lt=1, description="Share of the requests kept for evaluation, by their hash.")
    tenant_label: str = Field("tenant", description="Label that says whose a request is.")
    cross_tenant: bool = Field(False, description="Whether one export may hold requests of several tenants.")
    exclude_tenants: list[str] = Field([], description="Tenants whose requests are never training data.")
    redact: str | None = Field(
        None,
        pattern=r"^[\w.-]+(:[\w.]+)?$",
        description="`module:function`, or an entry point of `driftwatch.redactors`: gets each row before it is "
        "written, returns it, changed, or None to leave it out.",
    )
    keep_days: float = Field(30, gt=0, description="Days that an export is kept once its retrain is over.")

    @model_validator(mode="after")
    def _room_for_the_event(self) -> Self:
        if self.low_share + self.replay_share >= 1:
            raise ValueError("low_share and replay_share leave no room for the requests of the event")
        return self


class Gate(Section):
    """When a candidate is better than the incumbent."""

    margin: float = Field(
        0.01, ge=0, lt=1, description="Gain in hit rate that a candidate must show where it was asked for."
    )
    tolerance: float = Field(
        0.03, gt=0, lt=1, description="Loss in hit rate that is borne in any cell that carries traffic."
    )
    min_share: float = Field(
        0.01, gt=0, le=1, description="Share of the requests from which on a cell carries traffic."
    )
    tail_tolerance: float = Field(
        0.01, gt=0, lt=1, description="Share of requests, beyond one in a hundred, that may be slower than the p99 was."
    )
    error: float = Field(0.01, gt=0, lt=0.5, description="Chance of a promotion that is none, and of such a rejection.")
    history: int = Field(2000, ge=10, description="Stored samples that a candidate is replayed on first, at most.")
    live: int = Field(20_000, ge=0, description="Live samples after which an undecided candidate is rejected.")


class Retrain(Section):
    export_dir: Annotated[str, BeforeValidator(str)] = Field(
        "driftwatch-exports", description="Folder, or fsspec URL (`s3://...`), that training data is written to."
    )
    cooldown_hours: float = Field(24.0, ge=0, description="Hours between two retrain requests for the same cell.")
    expire_hours: float = Field(168.0, gt=0, description="Hours of silence after which an open request expires.")
    callback_url: Url | None = Field(
        None, description="Base URL under which a pipeline reaches control; none: that of `control.listen`."
    )
    candidates_dir: Path | None = Field(
        None, description="Folder below which candidates must lie; none: no candidate is taken over HTTP."
    )
    policy: Policy = Field(Policy(), description="When an alarm becomes a request.")
    data: TrainingData = Field(TrainingData(), description="What training data holds.")
    gate: Gate = Field(Gate(), description="When a candidate is promoted.")
