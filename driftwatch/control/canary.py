"""Canary prompts: the same few questions, asked greedily on a timer, tell when a target changed in silence.

Control asks the engine itself, so the tap never sees these requests and no figure of traffic holds them. The first
``REFERENCE_RUNS`` rounds of a deployment are its reference; in each later one a prompt differs if its answer is none of
those, or if the same answer is more or less likely than it was. Engines do not always repeat themselves: between
8 requests at a time and 1, a real vLLM answered 24% of prompts otherwise (bf16, greedy). So a target counts as changed
when the lower 95% limit of the share that differs lies above ``NOISE``, twice in a row, and as itself again when it
does not.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy.orm import Session

from driftwatch.control import events
from driftwatch.control.changes import EVERYWHERE
from driftwatch.control.events import CANARY
from driftwatch.drift.interval import Estimate, student_quantile, wilson
from driftwatch.errors import SettingsError
from driftwatch.settings import Engine, Settings, secret
from driftwatch.store import canaries
from driftwatch.store.connection import Store
from driftwatch.store.schema import Canary, Deployment, Event

log = logging.getLogger(__name__)

FEWEST, MOST = 10, 50
REFERENCE_RUNS = 3
NOISE = 0.3
"""Share of prompts that an unchanged engine may answer otherwise."""
NATS = 0.05
"""Change of an answer's mean log-probability a token that is no noise of number formats and batches."""
MAX_TOKENS = 16
TIMEOUT_S = 60.0
SERVING_S = 86_400.0
"""A deployment without a sample for so long is not asked."""
MARK = {"x-driftwatch-canary": "1"}
"""Header by which logs and gateways can tell these requests."""


@dataclass(frozen=True)
class Answer:
    text: str
    logprob: float | None
    """Mean over its tokens; None where the engine gives none."""

    def is_like(self, other: Answer) -> bool:
        if self.logprob is None or other.logprob is None:
            return self.text == other.text
        return self.text == other.text and abs(self.logprob - other.logprob) <= NATS


def read(path: Path | None) -> list[str]:
    """The prompts, one a line; none without a file. Raises SettingsError if it cannot be read or holds too few."""
    if path is None:
        return []
    try:
        prompts = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise SettingsError(f"`canary.prompts`: {path}: {reason}; give a file with one prompt a line") from None
    if not FEWEST <= len(prompts) <= MOST:
        raise SettingsError(f"`canary.prompts`: {path} has {len(prompts)} prompts; give {FEWEST} to {MOST}, one a line")
    return prompts


def run(store: Store, settings: Settings, prompts: Sequence[str], client: httpx.Client, now: float) -> int:
    """Ask every deployment that serves; the number of deployments that answered."""
    with store.read() as session:
        serving = [(one.id, one.model) for one in canaries.serving(session, now - SERVING_S)]
    answered = 0
    for deployment_id, model in serving:
        answers = ask(client, settings.engine, model, prompts)
        if len(answers) * 2 < len(prompts):
            log.warning("canaries: %s answered %d of %d prompts: left out", model, len(answers), len(prompts))
            continue
        with store.write() as session:
            take(session, settings, deployment_id, prompts, answers, now)
        answered += 1
    return answered


def ask(client: httpx.Client, engine: Engine, model: str, prompts: Sequence[str]) -> dict[int, Answer]:
    """Greedy answers by number of the prompt; one that fails is left out. Raises SettingsError for a key's file."""
    url = f"{engine.url}/v1/chat/completions"
    token = secret(engine.token, engine.token_file, "engine.token_file")
    headers = MARK | ({} if token is None else {"authorization": f"Bearer {token}"})
    found: dict[int, Answer] = {}
    options: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": MAX_TOKENS}
    logprobs: dict[str, Any] = {"logprobs": True}
    for number, prompt in enumerate(prompts):
        body = options | {"messages": [{"role": "user", "content": prompt}]}
        try:
            answer = client.post(url, json=body | logprobs, headers=headers, timeout=TIMEOUT_S)
            if answer.status_code in (400, 422) and logprobs:  # an engine without them: ask for the text alone
                logprobs = {}
                answer = client.post(url, json=body, headers=headers, timeout=TIMEOUT_S)
            answer.raise_for_status()
            found[number] = _read(answer.json()["choices"][0])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            log.warning("canaries: %s did not answer prompt %d: %s", model, number, error or type(error).__name__)
    return found


def _read(choice: Mapping[str, Any]) -> Answer:
    content = (choice.get("logprobs") or {}).get("content") or []
    logprobs = [float(token["logprob"]) for token in content]
    mean = sum(logprobs) / len(logprobs) if logprobs else None
    return Answer(str(choice["message"]["content"]), None if mean is None else round(mean, 4))


def take(
    session: Session,
    settings: Settings,
    deployment_id: int,
    prompts: Sequence[str],
    answers: Mapping[int, Answer],
    now: float,
) -> None:
    """Add one round to a deployment's reference, or compare it with that, and open or close its event."""
    key = hashlib.sha256(json.dumps([MAX_TOKENS, *prompts]).encode()).hexdigest()
    row = canaries.of(session, deployment_id, key) or canaries.add(session, deployment_id, key, {"runs": 0}, now)
    row.updated_at = now
    known = {int(number): [Answer(*one) for one in seen] for number, seen in row.reference.get("answers", {}).items()}
    if row.reference["runs"] < REFERENCE_RUNS:
        for number, answer in answers.items():
            known[number] = [*known.get(number, []), answer]
        told = {str(number): [[one.text, one.logprob] for one in seen] for number, seen in sorted(known.items())}
        row.reference = {"runs": row.reference["runs"] + 1, "answers": told}
        row.state = {"changed": None}
        return
    compared = {number: answer for number, answer in answers.items() if number in known}
    differ = sum(not any(answer.is_like(one) for one in known[number]) for number, answer in compared.items())
    share = _share(differ, len(compared))
    suspicious = share.lower is not None and share.lower > NOISE
    streak = row.state.get("streak", 0) + 1 if suspicious else 0
    row.state = {"changed": streak > 1, "streak": streak, "differ": asdict(share)}
    _tell(session, settings, row, share, now)


def _share(differ: int, asked: int) -> Estimate:
    if asked < 2:
        return Estimate(None, None, None, asked, differ, asked)
    lower, upper = wilson(differ / asked, asked, student_quantile(asked - 1))
    return Estimate(differ / asked, max(lower, 0.0), min(upper, 1.0), asked, differ, asked)


def _tell(session: Session, settings: Settings, row: Canary, share: Estimate, now: float) -> None:
    mine = (Event.kind == CANARY, Event.deployment_id == row.deployment_id)
    still_open = events.open_events(session, *mine)
    if row.state["changed"] and not still_open:
        event = _event(session.get_one(Deployment, row.deployment_id), share, now)
        session.add(event)
        log.warning("canaries: %d of %d prompts are answered otherwise", share.numerator, share.denominator)
        events.introduce(session, settings, event)
    elif not row.state["streak"]:
        for event in still_open:
            events.end(session, settings, event, {"differ": asdict(share)}, now)


def _event(deployment: Deployment, share: Estimate, now: float) -> Event:
    evidence = f"{share.numerator:.0f} of {share.denominator:.0f} canary prompts are answered otherwise than at first"
    details = {
        "kind": CANARY,
        "segment": EVERYWHERE,
        "model": deployment.model,
        "deployment": deployment.facts,
        "metric": "differ",
        "definition": "share of canary prompts whose greedy answer, or its log-probability, is another than at first",
        "current": asdict(share),
        "limit": NOISE,
        "cause": "target",
        "action": "none",
        "evidence": [evidence],
        "against": ["no known fact of the deployment changed"],
    }
    return Event(
        id=uuid.uuid4().hex,
        kind=CANARY,
        cell_id=None,
        deployment_id=deployment.id,
        segment=EVERYWHERE,
        split="none",
        draft="",
        cause="target",
        opened_at=now,
        closed_at=None,
        request_id="",
        start_request_id=None,
        details=details,
    )
