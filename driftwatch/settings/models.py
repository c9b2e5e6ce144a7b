"""Sections about models: what is served, its drafts, and the shadow that judges them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import (
    Field,
    model_validator,
)

from driftwatch.acceptance import Rule
from driftwatch.settings.values import Listen, Section, Url


class Draft(Section):
    name: str = Field("incumbent", min_length=1, description="Name of the draft in figures and metrics.")
    path: str | None = Field(
        None,
        description="Folder of the draft, an EAGLE-3 head as a tree by `folder:steps=5,topk=4,tokens=8`; none: live "
        "figures only.",
    )
    sketch: Path | None = Field(
        None,
        description="Sketch of the draft's training data (`driftwatch sketch build`): figures on and off it apart.",
    )

    @model_validator(mode="after")
    def _sketch_of_a_draft(self) -> Self:
        if self.sketch is not None and self.path is None:
            raise ValueError("sketch needs path: the draft that it belongs to")
        return self


class HiddenStates(Section):
    """A second engine that runs the target for EAGLE-3 heads, where the shadow cannot."""

    url: Url = Field(
        description="Engine that gives EAGLE-3 heads their target's hidden states, so that the target is not run here."
    )
    layers: list[int] = Field(
        min_length=1, description="Layers that it was started with, as `hidden_states` indices, in its order."
    )
    folder: Path | None = Field(
        None, description="Of a vLLM, its `shared_storage_path` as seen from here; none: it is an SGLang."
    )


class Model(Section):
    name: str = Field("*", description="Served model name that this entry is for; `*` for any.")
    target: str | None = Field(None, description="Folder of the target; chain drafts under argmax need none.")
    tokenizer: str | None = Field(None, description="Folder of the target's tokenizer, for samples without token ids.")
    drafts: list[Draft] = Field([Draft()], description="Drafts judged on each sample; the first is the incumbent.")
    hidden_states: HiddenStates | None = Field(None, description="A second engine that runs the target.")
    gamma: int = Field(5, ge=1, le=32, description="Proposal length that the engine uses.")
    rule: Rule = Field("argmax", description="Acceptance rule that the engine uses.")
    break_even: float | None = Field(
        None,
        gt=1,
        description="Acceptance length at which speculation costs what it saves (gamma c + v), entered by hand where "
        "there is no profile; neither: value not judged.",
    )
    profile: Path | None = Field(
        None,
        description="Cost profile of target and incumbent (`driftwatch profile --out`, or costs by hand), from which "
        "value is judged at every load.",
    )
    batch: float | None = Field(
        None, ge=1, description="Requests that decode together; none: what the tap reads off the engine, else 1."
    )

    @model_validator(mode="after")
    def _break_even_within_reach(self) -> Self:
        if self.break_even is not None and self.profile is not None:
            raise ValueError("profile and break_even say the same: give one")
        if self.break_even is not None and self.break_even > self.gamma + 1:
            raise ValueError(f"break_even {self.break_even:g} is out of reach at gamma {self.gamma}")
        return self

    @model_validator(mode="after")
    def _target_of_hidden_states(self) -> Self:
        if self.hidden_states is not None and self.target is None:
            raise ValueError("hidden_states needs target: the folder with the target's config.json")
        return self


class Governor(Section):
    """What keeps the shadow out of the way of an engine on the same GPU, or of one whose load it must not add to."""

    busy_share: float = Field(1.0, gt=0, le=1, description="Share of time that the shadow computes at most.")
    memory_share: float | None = Field(
        None, gt=0, le=1, description="Share of the GPU's memory that the shadow takes at most."
    )
    headroom_bytes: int | None = Field(
        None, ge=0, description="Free memory of the GPU below which no batch starts, whoever took it."
    )
    engine_metrics: Url | None = Field(
        None, description="Metrics of the engine to give way to, for example `http://engine:8000/metrics`."
    )
    max_waiting: int | None = Field(
        None, ge=0, description="Requests waiting in the engine above which no batch starts."
    )
    max_tpot_p99_s: float | None = Field(
        None, gt=0, description="p99 of the engine's time per output token, in seconds, above which no batch starts."
    )

    @model_validator(mode="after")
    def _limits_need_metrics(self) -> Self:
        limits = (self.max_waiting, self.max_tpot_p99_s)
        if (self.engine_metrics is None) != all(limit is None for limit in limits):
            raise ValueError("engine_metrics goes with a limit: max_waiting, max_tpot_p99_s or both")
        return self


class Shadow(Section):
    device: str = Field("auto", description="`auto` (CUDA if there, else CPU) or a torch device.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Weights' type; `auto`: bfloat16 on a GPU, float32 on a CPU."
    )
    device_map: str | None = Field(
        None,
        description="How transformers spreads the target over several GPUs: `auto`, `balanced` and so on; "
        "none: all of it on `device`.",
    )
    batch_tokens: int = Field(16_384, ge=256, description="Tokens of one batch at most, padding included.")
    lease_s: float = Field(60.0, gt=0, description="Seconds after which a silent worker's samples go to another.")
    poll_s: float = Field(1.0, gt=0, description="Seconds between two looks for work when there was none.")
    threads: int | None = Field(None, ge=1, description="CPU threads; none: torch's own choice.")
    listen: Listen = Field("127.0.0.1:9466", description="The worker's own health and metrics.")
    governor: Governor = Field(Governor(), description="How the shadow gives way to others.")
