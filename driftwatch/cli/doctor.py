"""``driftwatch doctor``: every check that can be made before traffic."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import httpx

from driftwatch.cli.options import needs_shadow
from driftwatch.errors import DriftwatchError
from driftwatch.retrain.delivery import signers
from driftwatch.settings import Model, Settings, load, secret
from driftwatch.store import migrate
from driftwatch.store.connection import Store

Level = Literal["ok", "warning", "problem"]
COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


@dataclass(frozen=True)
class Finding:
    level: Level
    what: str
    text: str


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML); else environment and defaults.")
@click.option("--draft", type=click.Path(path_type=Path), help="Check this draft instead of the configured ones.")
@click.option("--target", type=click.Path(path_type=Path), help="The target that --draft is for.")
def doctor(config: Path | None, draft: Path | None, target: Path | None) -> None:
    """Say what is wrong before traffic does; exit 1 if something is."""
    settings = load(config)
    findings = list(_draft(settings, draft, target) if draft else _everything(settings, config))
    for finding in findings:
        click.echo(f"{click.style(f'{finding.level:8}', fg=COLOURS[finding.level])} {finding.what}: {finding.text}")
    if any(finding.level == "problem" for finding in findings):
        sys.exit(1)


def _everything(settings: Settings, config: Path | None) -> Iterator[Finding]:
    yield Finding("ok", "settings", str(config or "environment and defaults"))
    yield from _checked("secrets", lambda: _secrets(settings))
    yield from _checked("store", lambda: _store(settings))
    yield _engine(settings)
    for model in settings.models:
        named = [draft for draft in model.drafts if draft.path is not None]
        if not named:
            yield Finding("warning", f"model {model.name}", "no draft has a path: live figures only, no shadow")
        for draft in named:
            yield from _draft(settings, Path(draft.path or ""), _tokenizer(model))


def _checked(what: str, check: Callable[[], str]) -> Iterator[Finding]:
    try:
        yield Finding("ok", what, check())
    except DriftwatchError as error:
        yield Finding("problem", what, str(error))


def _secrets(settings: Settings) -> str:
    token = secret(settings.control.token, settings.control.token_file, "control.token_file")
    for hook in settings.webhooks:
        signers(hook)
    return f"{'a token' if token else 'no token'} for the API, {len(settings.webhooks)} webhook endpoints"


def _store(settings: Settings) -> str:
    store = Store(settings.store.url)
    if problems := migrate.problems(store):
        raise DriftwatchError(f"{store.name}: {problems[0]}")
    return f"{store.name} is up to date"


def _engine(settings: Settings) -> Finding:
    url = settings.engine.url
    try:
        response = httpx.get(f"{url}/v1/models", timeout=5, trust_env=False)
    except httpx.HTTPError as error:
        return Finding("problem", "engine", f"{url}: {error or type(error).__name__}; is it running? (engine.url)")
    if response.status_code >= 500:
        return Finding("problem", "engine", f"{url} answers {response.status_code}")
    return Finding("ok", "engine", f"{url} answers")


def _tokenizer(model: Model) -> Path | None:
    folder = model.tokenizer or model.target
    return Path(folder) if folder else None


def _draft(settings: Settings, folder: Path, target: Path | None) -> Iterator[Finding]:
    def check() -> str:
        try:
            from driftwatch.shadow.device import pick_device, pick_dtype
            from driftwatch.shadow.tokenizer import Retokeniser
            from driftwatch.shadow.worker import load_draft
        except ModuleNotFoundError as error:
            raise needs_shadow(error) from None
        device = pick_device(settings.shadow.device)
        dtype = pick_dtype(settings.shadow.dtype, device)
        tokenizer = Retokeniser(target) if target else None
        found = load_draft(folder, tokenizer, device=device, dtype=dtype).fingerprint
        return (
            f"{found.kind} draft, {found.parameters:,} parameters, {found.vocabulary:,} token ids, "
            f"sha256 {found.sha256[:12]}, on {device}"
        )

    yield from _checked(f"draft {folder}", check)
    if target is None:
        yield Finding("warning", f"draft {folder}", "no tokenizer is named, so its vocabulary was not compared")
