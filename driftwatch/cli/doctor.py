"""``driftwatch doctor``: every check that can be made before traffic."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import click
import httpx

from driftwatch.cli.options import needs_shadow
from driftwatch.control.costs import is_lookup, read_profile
from driftwatch.drift.sketch.file import read_for
from driftwatch.errors import DriftwatchError, RecordError
from driftwatch.records import read_records
from driftwatch.retrain.delivery import signers
from driftwatch.retrain.presets import template
from driftwatch.retrain.redaction import redactor
from driftwatch.settings import Model, Settings, load, secret
from driftwatch.store import migrate
from driftwatch.store.connection import Store
from driftwatch.tap.segments import Segments

Level = Literal["ok", "warning", "problem"]
COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}
POOR_FIT = 0.2
"""Relative error of a cost profile's fit from which on it is a warning."""


@dataclass(frozen=True)
class Finding:
    level: Level
    what: str
    text: str


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML); else environment and defaults.")
@click.option("--draft", help="Check this draft, a folder or a name, instead of the configured ones.")
@click.option("--target", type=click.Path(path_type=Path), help="The target that --draft is for; it tries the draft.")
@click.option(
    "--records",
    type=click.Path(path_type=Path),
    help="Served requests (JSONL) to try --draft on; without, the target writes some text.",
)
def doctor(config: Path | None, draft: str | None, target: Path | None, records: Path | None) -> None:
    """Say what is wrong before traffic does; exit 1 if something is."""
    settings = load(config)
    if records is not None:
        if draft is None:
            raise DriftwatchError("--records needs --draft: the draft that is tried on them")
        next(read_records([records]), None)  # wrong use is said before anything is found
    checks = _draft(settings, draft, target, target, records) if draft else _everything(settings, config)
    worst: set[Level] = set()
    for finding in checks:
        click.echo(f"{click.style(f'{finding.level:8}', fg=COLOURS[finding.level])} {finding.what}: {finding.text}")
        worst.add(finding.level)
    if "problem" in worst:
        sys.exit(1)


def _everything(settings: Settings, config: Path | None) -> Iterator[Finding]:
    yield Finding("ok", "settings", str(config or "environment and defaults"))
    yield from _checked("secrets", lambda: _secrets(settings))
    yield from _checked("segments", lambda: _segments(settings))
    yield _store(settings)
    yield _engine(settings)
    for model in settings.models:
        named = [draft for draft in model.drafts if draft.path is not None]
        if not named:
            yield Finding("warning", f"model {model.name}", "no draft has a path: live figures only, no shadow")
        for draft in named:
            target = Path(model.target) if model.target else None
            yield from _draft(settings, draft.path or "", target, _tokenizer(model), model=model)
            if draft.sketch is not None:
                yield from _checked(f"sketch {draft.sketch}", partial(_sketch, draft.sketch, draft.path or ""))
        if model.profile is not None:
            yield from _profile(model)


def _checked(what: str, check: Callable[[], str]) -> Iterator[Finding]:
    try:
        yield Finding("ok", what, check())
    except DriftwatchError as error:
        yield Finding("problem", what, str(error))


def _secrets(settings: Settings) -> str:
    token = secret(settings.control.token, settings.control.token_file, "control.token_file")
    for hook in settings.webhooks:
        signers(hook)
        template(hook)
    redactor(settings.retrain.data.redact)
    return f"{'a token' if token else 'no token'} for the API, {len(settings.webhooks)} webhook endpoints"


def _segments(settings: Settings) -> str:
    Segments(settings.segments, max_segments=settings.control.max_segments)
    return f"labels: {', '.join(segment.label for segment in settings.segments) or 'none, one segment `all`'}"


def _store(settings: Settings) -> Finding:
    try:
        store = Store(settings.store.url)
        problems = migrate.problems(store)
    except DriftwatchError as error:
        return Finding("problem", "store", str(error))
    if not problems:
        return Finding("ok", "store", f"{store.name} is up to date")
    if migrate.is_empty(store):
        return Finding("warning", "store", f"{store.name} is empty: serve and control migrate it when they start")
    return Finding("problem", "store", f"{store.name}: {problems[0]}")


def _engine(settings: Settings) -> Finding:
    engine = settings.engine
    url = engine.url
    try:
        token = secret(engine.token, engine.token_file, "engine.token_file")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        response = httpx.get(f"{url}/v1/models", headers=headers, timeout=5, trust_env=False)
    except DriftwatchError as error:
        return Finding("problem", "engine", str(error))
    except httpx.HTTPError as error:
        return Finding("problem", "engine", f"{url}: {error or type(error).__name__}; is it running? (engine.url)")
    if response.status_code in (401, 403):
        wants = "another API key than that of engine.token" if token else "an API key: set engine.token"
        return Finding("problem", "engine", f"{url} answers {response.status_code}: it wants {wants}")
    if response.status_code >= 500:
        return Finding("problem", "engine", f"{url} answers {response.status_code}")
    return Finding("ok", "engine", f"{url} answers")


def _sketch(path: Path, spec: str) -> str:
    try:
        from driftwatch.shadow.draft import hash_weights
        from driftwatch.shadow.open import folder_of
    except ModuleNotFoundError as error:
        raise needs_shadow(error) from None
    sketch = read_for(path, hash_weights(folder_of(spec)))
    return f"belongs to its draft, learnt from {sketch.rows} prompts, epsilon {sketch.epsilon:g}"


def _profile(model: Model) -> Iterator[Finding]:
    """Whether the cost profile can be read, and is of this model's target and first trained draft, as far as its path
    is known; its device is the engine's."""
    path, trained = Path(model.profile or ""), [draft.path for draft in model.drafts if not is_lookup(draft)]
    first, named = next(iter(trained), None), next(filter(None, trained), None)
    what = f"profile {path}"
    try:
        from driftwatch.shadow.profile.bound import misfits, shape_of
    except ModuleNotFoundError as error:
        yield Finding("problem", what, str(needs_shadow(error)))
        return
    again = "measure it again with `driftwatch profile`"
    try:
        profile = read_profile(path)
        shape = None if first is None else shape_of(first)
        target = Path(model.target) if model.target and model.hidden_states is None else None
        others = misfits(profile, first, target)
    except DriftwatchError as error:
        yield Finding("problem", what, str(error))
        return
    bound = profile.bound
    made = " ".join(fact for fact in (bound.device, bound.dtype) if fact) or "a device that it does not name"
    yield Finding("ok", what, f"costs {profile.origin}, of {made}; the engine's own must be the same")
    if others:
        yield Finding("problem", what, f"it is not of {' and '.join(others)}; {again}")
    if profile.draft is None and named is not None:
        yield Finding("problem", what, f"it has no draft; {again} --draft {named}")
    elif profile.draft is not None and shape is not None and profile.shape != shape:
        priced, made = profile.shape.described, shape.described
        yield Finding("problem", what, f"it has the costs of {priced}, the draft makes {made}; {again}")
    if profile.error is not None and profile.error.rms > POOR_FIT:
        yield Finding("warning", what, f"its fit is off by {profile.error.rms:.0%}: verdicts will be cautious")


def _tokenizer(model: Model) -> Path | None:
    folder = model.tokenizer or model.target
    return Path(folder) if folder else None


def _draft(
    settings: Settings,
    spec: str,
    target: Path | None,
    tokenizer: Path | None,
    records: Path | None = None,
    model: Model | None = None,
) -> Iterator[Finding]:
    """What the draft is, whether it fits, and whether it works on its target. ``model``: the entry that names it."""
    what = f"draft {spec}"
    try:
        from driftwatch.shadow.checkup import checkup
    except ModuleNotFoundError as error:
        yield Finding("problem", what, str(needs_shadow(error)))
        return
    try:
        for level, text in checkup(settings.shadow, spec, target, tokenizer, records, model):
            yield Finding(level, what, text)
    except RecordError:  # a file that the command was given, not what it checks
        raise
    except DriftwatchError as error:
        yield Finding("problem", what, str(error))
    if tokenizer is None:
        yield Finding("warning", what, "no tokenizer is named, so its vocabulary was not compared")
