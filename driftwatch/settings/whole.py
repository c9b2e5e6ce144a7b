"""All settings, and how they are read: one YAML file, each key also as environment variable."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self, get_args

import yaml
from pydantic import (
    BaseModel,
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

from driftwatch.errors import SettingsError
from driftwatch.settings.detection import Canary, Detect, Slo, Value
from driftwatch.settings.models import Model, Shadow
from driftwatch.settings.retraining import Delivery, Retrain, Webhook
from driftwatch.settings.serving import Control, Engine, Retention, Sampling, Segment, Store, Tap
from driftwatch.settings.values import refuse_twice

SECRET_KEYS = frozenset({"token", "secrets", "headers"})
"""Keys whose values appear in no message."""


_PASSWORD = re.compile(
    r"(://[^/?#@:]*:)(?:[^/?#]+|[^@]+)(?=@)|([?&](?:password|token|key|secret)=)[^&#]+", re.IGNORECASE
)
"""What stands between user and host, where there is such, also one that is not percent-encoded; and in the query."""


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
    value: Value = Value()
    slo: Slo = Slo()
    canary: Canary = Canary()
    retention: Retention = Retention()
    retrain: Retrain = Retrain()
    delivery: Delivery = Delivery()
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
        refuse_twice("segments", "label", [segment.label for segment in self.segments])
        refuse_twice("webhooks", "name", [webhook.name for webhook in self.webhooks])
        refuse_twice("models", "name", [model.name for model in self.models])
        for model in self.models:
            refuse_twice(f"drafts of model {model.name!r}", "name", [draft.name for draft in model.drafts])
        return self

    def masked(self) -> dict[str, Any]:
        """The settings without what is secret: tokens, and passwords inside URLs."""
        values: dict[str, Any] = self.model_dump(mode="json")
        engines = [model["hidden_states"] or {} for model in values["models"]]
        for section in (values["engine"], values["store"], values["tap"], *values["webhooks"], *engines):
            for key in ("url", "control_url"):
                if key in section:
                    section[key] = _PASSWORD.sub(r"\1\2***", section[key])
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
