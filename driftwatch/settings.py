"""Settings: one YAML file, each key also as environment variable (``DRIFTWATCH_ENGINE__URL``).

The classes below are the only list of keys: validation, defaults, the command line's errors and the README's table
(:func:`reference`) all derive from them.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    AnyHttpUrl,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import (
    SettingsError as SettingsSourceError,
)

from driftwatch.acceptance import Rule
from driftwatch.errors import SettingsError

SECRET_KEYS = frozenset({"token", "secrets"})
"""Keys whose values appear in no message."""

EngineKind = Literal["auto", "vllm", "sglang", "trtllm", "openai"]


def _check_listen(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 65536:
        raise ValueError("write host:port, for example 127.0.0.1:9464")
    return value


def _check_url(value: str) -> str:
    TypeAdapter(AnyHttpUrl).validate_python(value)
    return value.rstrip("/")


Listen = Annotated[str, AfterValidator(_check_listen)]
Url = Annotated[str, AfterValidator(_check_url)]


def host_port(listen: str) -> tuple[str, int]:
    """Split ``host:port``; brackets of an IPv6 host are removed."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)


_PASSWORD = re.compile(r"(://[^/?#@]*:|[?&](?:password|token|key|secret)=)[^@/&#]+", re.IGNORECASE)


def _refuse_twice(where: str, key: str, names: list[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{where}: {key} {name!r} is given {count} times")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Engine(Section):
    url: Url = Field("http://127.0.0.1:8000", description="Base URL of the inference engine behind the tap.")
    kind: EngineKind = Field("auto", description="Engine dialect; `auto` asks the engine once.")
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


class Draft(Section):
    name: str = Field("incumbent", min_length=1, description="Name of the draft in figures and metrics.")
    path: str | None = Field(None, description="Folder of the draft; none: live figures only.")


class Model(Section):
    name: str = Field("*", description="Served model name that this entry is for; `*` for any.")
    target: str | None = Field(None, description="Folder of the target; chain drafts under argmax need none.")
    tokenizer: str | None = Field(None, description="Folder of the target's tokenizer, for samples without token ids.")
    drafts: list[Draft] = Field([Draft()], description="Drafts judged on each sample; the first is the incumbent.")
    gamma: int = Field(5, ge=1, le=32, description="Proposal length that the engine uses.")
    rule: Rule = Field("argmax", description="Acceptance rule that the engine uses.")


class Shadow(Section):
    device: str = Field("auto", description="`auto` (CUDA if there, else CPU) or a torch device.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Weights' type; `auto`: bfloat16 on a GPU, float32 on a CPU."
    )
    batch_tokens: int = Field(16_384, ge=256, description="Tokens of one batch at most, padding included.")
    lease_s: float = Field(60.0, gt=0, description="Seconds after which a silent worker's samples go to another.")
    poll_s: float = Field(1.0, gt=0, description="Seconds between two looks for work when there was none.")
    threads: int | None = Field(None, ge=1, description="CPU threads; none: torch's own choice.")


class Sampling(Section):
    per_window: int = Field(8, ge=1, description="Requests sampled per segment and window.")
    window_s: float = Field(15.0, gt=0, description="Length of a sampling window in seconds.")
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
        100_000, ge=10, description="At most one false alarm in this many sampled requests, over all cells."
    )


class Retention(Section):
    payload_days: float = Field(7, gt=0, description="Days that token ids and text are kept.")
    replay_days: float = Field(90, gt=0, description="Days that samples and their replays are kept; roll-ups stay.")
    text: bool = Field(
        False, description="Keep the text of samples that came as text; off: it is deleted once tokenised."
    )


class Webhook(Section):
    name: str = Field(min_length=1, description="Name of the endpoint.")
    url: Url = Field(description="Where events are posted.")
    secrets: list[SecretStr] = Field([], description="Standard Webhooks secrets (`whsec_...`); all sign, for rotation.")
    secrets_file: Path | None = Field(None, description="File with one secret a line.")
    events: list[str] = Field(["*"], description="Event types delivered; `*` for all.")


class Retrain(Section):
    export_dir: Path = Field(Path("driftwatch-exports"), description="Folder that training data is written to.")
    cooldown_hours: float = Field(24.0, ge=0, description="Hours between two retrain requests for the same cell.")


class Settings(BaseSettings):
    """Everything that can be configured."""

    model_config = SettingsConfigDict(
        env_prefix="DRIFTWATCH_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    engine: Engine = Engine()
    tap: Tap = Tap()
    control: Control = Control()
    store: Store = Store()
    models: list[Model] = [Model()]
    shadow: Shadow = Shadow()
    sampling: Sampling = Sampling()
    segments: list[Segment] = [
        Segment(label="tenant", header="x-tenant"),
        Segment(label="prompt_bytes", bucket=[2048, 16384]),
    ]
    detect: Detect = Detect()
    retention: Retention = Retention()
    retrain: Retrain = Retrain()
    webhooks: list[Webhook] = []

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return env_settings, init_settings

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        _refuse_twice("segments", "label", [segment.label for segment in self.segments])
        _refuse_twice("webhooks", "name", [webhook.name for webhook in self.webhooks])
        _refuse_twice("models", "name", [model.name for model in self.models])
        for model in self.models:
            _refuse_twice(f"drafts of model {model.name!r}", "name", [draft.name for draft in model.drafts])
        return self

    def masked(self) -> dict[str, Any]:
        """The settings without what is secret: tokens, and passwords inside URLs."""
        values: dict[str, Any] = self.model_dump(mode="json")
        for section in (values["engine"], values["store"], values["tap"], *values["webhooks"]):
            for key in ("url", "control_url"):
                if key in section:
                    section[key] = _PASSWORD.sub(r"\1***", section[key])
        return values

    def model_for(self, name: str | None) -> Model | None:
        """The entry for a served model name: an exact one before ``*``."""
        exact = [model for model in self.models if model.name == name]
        return next(iter(exact + [model for model in self.models if model.name == "*"]), None)


def load(path: Path | None) -> Settings:
    """Read settings from a YAML file and the environment, the environment winning.

    Raises SettingsError naming the key and the value.
    """
    values: Any = {}
    if path is not None:
        try:
            values = yaml.safe_load(path.read_text()) or {}
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror or error}; give an existing settings file") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(values, dict):
            raise SettingsError(f"{path}: the file must hold keys such as `engine:`, not a {type(values).__name__}")
        for key in values:
            if not isinstance(key, str):
                raise SettingsError(f"{path}: unknown key `{key}`; known are {', '.join(Settings.model_fields)}")
    _refuse_unknown_environment()
    try:
        return Settings(**values)
    except SettingsSourceError as error:
        raise SettingsError(f"environment: {error}; lists are written as JSON") from None
    except ValidationError as error:
        raise SettingsError(f"{path or 'settings'}: {_explain(error)}") from None


def _refuse_unknown_environment() -> None:
    """A mistyped DRIFTWATCH_ variable must not be ignored silently.

    Only names with ``__`` are surely meant for us: Kubernetes sets DRIFTWATCH_PORT and the like for its Services.
    """
    for name in os.environ:
        section = name.removeprefix("DRIFTWATCH_").split("__")[0].lower()
        if name.startswith("DRIFTWATCH_") and "__" in name and section not in Settings.model_fields:
            raise SettingsError(f"environment: {name} names no setting; known are {', '.join(Settings.model_fields)}")


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key `{key}`{_similar(first['loc'])}"
    message = first["msg"].removeprefix("Value error, ")
    value = first["input"]
    hidden = isinstance(value, dict) or not SECRET_KEYS.isdisjoint(first["loc"])
    shown = "" if hidden else f" (got {value!r})"
    return f"`{key}`: {message}{shown}"


def _similar(loc: tuple[int | str, ...]) -> str:
    known: dict[str, FieldInfo] = Settings.model_fields
    for part in loc[:-1]:
        if isinstance(part, str):
            known = _section(known[part]).model_fields
    close = get_close_matches(str(loc[-1]), known, 1)
    return f", did you mean `{close[0]}`?" if close else f"; known here: {', '.join(known)}"


def _section(field: FieldInfo) -> type[BaseModel]:
    """The section class of a field, also inside a list."""
    annotation: Any = field.annotation
    inner = annotation if isinstance(annotation, type) else get_args(annotation)[0]
    assert issubclass(inner, BaseModel)
    return inner


def secret(value: SecretStr | None, file: Path | None, key: str) -> str | None:
    """A secret given directly or in a file. Raises SettingsError if the file cannot be read or is empty."""
    if value is not None:
        return value.get_secret_value()
    if file is None:
        return None
    try:
        text = file.read_text().strip()
    except OSError as error:
        raise SettingsError(f"`{key}`: {file}: {error.strerror or error}") from None
    if not text:
        raise SettingsError(f"`{key}`: {file} is empty")
    return text


def leaves(section: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key with its dotted name, lists as ``models[].name``."""
    for name, field in section.model_fields.items():
        annotation: Any = field.annotation
        is_list = get_origin(annotation) is list
        inner = get_args(annotation)[0] if is_list else annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner, f"{prefix}{name}{'[]' if is_list else ''}.")
        else:
            yield prefix + name, field


def reference() -> str:
    """The README's table of settings, in Markdown."""
    rows = ["| key | default | meaning |", "| --- | --- | --- |"]
    for key, field in leaves():
        default = "required" if field.is_required() else f"`{_plain(field.default)}`"
        rows.append(f"| `{key}` | {default} | {field.description} |")
    return "\n".join(rows)


def _plain(value: Any) -> str:
    return json.dumps(value, default=str).strip('"')


if __name__ == "__main__":
    print(reference())
