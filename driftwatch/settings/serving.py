"""Sections about traffic: the engine, the tap, control, the store, sampling, segments, retention."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import (
    Field,
    SecretStr,
    model_validator,
)

from driftwatch.settings.values import Listen, Section, Url, host_port

EngineKind = Literal["auto", "vllm", "sglang", "trtllm", "openai"]


class Engine(Section):
    url: Url = Field("http://127.0.0.1:8000", description="Base URL of the inference engine behind the tap.")
    kind: EngineKind = Field("auto", description="Engine dialect; `auto` asks the engine once.")
    token: SecretStr | None = Field(
        None, min_length=1, description="API key of the engine, with which the tap asks for its version and metrics."
    )
    token_file: Path | None = Field(None, description="File holding the engine's API key.")
    metrics_interval_s: float = Field(
        15.0, ge=0, description="Seconds between two looks of the tap at the engine's own metrics; 0: none."
    )
    drained_metrics: bool = Field(
        False,
        description="This tap is the one reader of TensorRT-LLM's `/metrics`, whose entries are gone once read.",
    )


class Tap(Section):
    listen: Listen = Field("0.0.0.0:8080", description="Where clients connect; every path on it belongs to the engine.")
    admin: Listen = Field("127.0.0.1:9465", description="The tap's own health and metrics.")
    control_url: Url = Field("http://127.0.0.1:9464", description="Where sampled exchanges are sent.")
    queue: int = Field(2048, ge=1, description="Exchanges held for control at most; more are dropped and counted.")
    capture_bytes: int = Field(
        2_000_000,
        ge=1024,
        description="Largest body kept of a sampled exchange; a larger one is counted only.",
    )
    memory_bytes: int = Field(
        512 * 1024 * 1024, ge=1024, description="Bytes of bodies held for recording at most, over all exchanges."
    )
    notice_s: float = Field(
        1.0, ge=0, description="Seconds between readiness off and the last new request, on SIGTERM."
    )
    drain_s: float = Field(30.0, ge=0, description="Seconds that streams in flight get to finish after SIGTERM.")


class Control(Section):
    listen: Listen = Field("127.0.0.1:9464", description="Admin API, metrics, web page; loopback only without a token.")
    token: SecretStr | None = Field(None, min_length=1, description="Bearer token of the API; none: loopback only.")
    token_file: Path | None = Field(None, description="File holding the bearer token.")
    metrics_listen: Listen | None = Field(
        None, description="Another listener for health and metrics alone, without token."
    )
    max_segments: int = Field(100, ge=1, description="Segments kept apart; samples of further ones count as `other`.")
    tick_s: float = Field(5.0, gt=0, description="Seconds between two rounds of detection and delivery.")

    @model_validator(mode="after")
    def _loopback_without_token(self) -> Self:
        host = host_port(self.listen)[0]
        if self.token is None and self.token_file is None and host not in ("127.0.0.1", "localhost", "::1"):
            raise ValueError(f"listen {self.listen!r} is not loopback: set control.token or control.token_file")
        return self


class Store(Section):
    url: str = Field("sqlite:///driftwatch.db", description="SQLAlchemy URL: SQLite, or `postgresql+psycopg://...`.")


class Sampling(Section):
    per_window: int = Field(8, ge=1, description="Requests sampled per segment and window.")
    window_s: float = Field(15.0, gt=0, description="Length of a sampling window in seconds.")
    mining_per_window: int = Field(
        0,
        ge=0,
        description="Requests kept further per segment and window while an event is open there: training data alone, "
        "part of no figure.",
    )
    tokens_per_day: int | None = Field(
        None,
        ge=1,
        description="Tokens replayed per day (UTC) at most; what comes after is stored and counted, not judged.",
    )


class Segment(Section):
    """A label of each request: from a header, from the JSON body, or its size in bytes, perhaps cut into buckets."""

    label: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="Name of the label.")
    header: str | None = Field(None, description="Request header that holds the value.")
    json_path: str | None = Field(None, description="JSONPath into the request body, for example `$.metadata.team`.")
    bucket: list[float] | None = Field(None, description="Edges that cut a number into ranges.")

    @model_validator(mode="after")
    def _has_source(self) -> Self:
        if self.header and self.json_path:
            raise ValueError(f"label {self.label!r} names a header and a json_path: give one")
        if not self.header and not self.json_path:
            if self.label != "prompt_bytes":
                raise ValueError(f"label {self.label!r} needs a header or a json_path (or name it prompt_bytes)")
            if not self.bucket:
                raise ValueError("label 'prompt_bytes' needs bucket edges, for example [2048, 16384]")
        if self.bucket is not None and (not self.bucket or sorted(set(self.bucket)) != self.bucket):
            raise ValueError(f"label {self.label!r}: bucket edges {self.bucket} must rise")
        return self


class Retention(Section):
    payload_days: float = Field(7, gt=0, description="Days that token ids and text are kept.")
    replay_days: float = Field(90, gt=0, description="Days that samples and their replays are kept; roll-ups stay.")
    text: bool = Field(
        False, description="Keep the text of samples that came as text; off: it is deleted once tokenised."
    )
