"""What settings are made of: sections, addresses, secrets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    AnyHttpUrl,
    BaseModel,
    ConfigDict,
    SecretStr,
    TypeAdapter,
)

from driftwatch.errors import SettingsError


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


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def refuse_twice(where: str, key: str, names: list[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{where}: {key} {name!r} is given {count} times")


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
