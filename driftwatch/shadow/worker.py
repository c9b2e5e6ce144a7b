"""The worker: leases samples, replays the drafts on them, hands in the weights. Any number of them may run."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

from driftwatch.acceptance import DEFAULT_GAMMA, Rule
from driftwatch.drift.sketch.file import read_for
from driftwatch.drift.sketch.sketch import Sketch
from driftwatch.errors import ModelError, SettingsError, StoreError
from driftwatch.settings import Settings
from driftwatch.shadow import surprise
from driftwatch.shadow.candidates import Candidates, Load
from driftwatch.shadow.causal import Causal
from driftwatch.shadow.device import cap_memory, free_bytes, pick_device, pick_dtype
from driftwatch.shadow.draft import Draft, Limited, Tokens
from driftwatch.shadow.governor import Governor, Stopped
from driftwatch.shadow.open import Opening, folder_of, is_named, open_draft
from driftwatch.shadow.pressure import Pressure
from driftwatch.shadow.replay import Result, replay
from driftwatch.shadow.splits import Split, splits
from driftwatch.shadow.target import NoTargetError, Target
from driftwatch.shadow.tokenizer import Retokeniser
from driftwatch.store import work
from driftwatch.store.connection import Store
from driftwatch.store.work import Task, Verdict

log = logging.getLogger(__name__)

LEASE_ROWS = 64


class Worker:
    """One shadow process. Loads every configured draft at once, so that a bad one is known before work is taken.

    Raises ModelError, SketchError or SettingsError when a draft cannot be used.
    """

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        if settings.shadow.threads is not None:
            torch.set_num_threads(settings.shadow.threads)
        device = pick_device(settings.shadow.device)
        dtype = pick_dtype(settings.shadow.dtype, device)
        self._stop = threading.Event()
        self._interrupted = False
        """Whether the store failed in the last step."""
        self._trouble: dict[tuple[str, str], str] = {}
        """What last kept a draft's samples from being judged, while it does."""
        self.governor = self._governor(device)
        self._drafts: dict[tuple[str, str], Draft] = {}
        self._sketches: dict[tuple[str, str], Sketch] = {}
        self._live_only: set[tuple[str, str]] = set()
        self._targets: dict[tuple[str, str], Causal] = {}
        self._loads: dict[str, Load] = {}
        self._candidates = Candidates(store, settings, self._drafts)
        self._tokenizers: dict[str, Retokeniser] = {}
        self._rules: dict[str, Rule] = {model.name: model.rule for model in settings.models}
        for model in settings.models:
            if folder := model.tokenizer or model.target:
                self._tokenizers[model.name] = Retokeniser(Path(folder))
            opening = Opening.configured(settings.shadow, model.rule, depths=max(DEFAULT_GAMMA, model.gamma))
            target = None
            if model.target is not None:
                target = Target.configured(Path(model.target), settings.shadow, model.hidden_states)
            self._loads[model.name] = partial(
                load_draft, tokenizer=self._tokenizers.get(model.name), opening=opening, target=target
            )
            for draft in model.drafts:
                if draft.path is None:
                    continue
                try:
                    loaded = load_draft(draft.path, self._tokenizers.get(model.name), opening, target)
                    self._drafts[model.name, draft.name] = loaded
                    if draft.sketch is not None:
                        self._sketches[model.name, draft.name] = read_for(draft.sketch, loaded.fingerprint.sha256)
                except NoTargetError as error:
                    log.warning("draft %s of model %s: live figures only: %s", draft.name, model.name, error)
                    self._live_only.add((model.name, draft.name))
            if target is not None and model.drafts and (judging := surprise.model_of(target, device)) is not None:
                self._targets[model.name, model.drafts[0].name] = judging
        if not self._drafts and not self._live_only:
            raise SettingsError("`models[].drafts[].path`: no draft has a path, so the shadow has nothing to do")
        log.info("shadow on %s (%s), drafts: %s", device, dtype, ", ".join(name for _, name in self._drafts))

    def _governor(self, device: torch.device) -> Governor:
        limits = self._settings.shadow.governor
        if limits.memory_share is not None:
            cap_memory(device, limits.memory_share)
        return Governor(
            limits,
            self._wait,
            pressure=Pressure(limits, httpx.Client()),
            free_bytes=lambda: free_bytes(device),
        )

    def _wait(self, seconds: float) -> bool:
        return self._stop.wait(seconds)

    def run(self, stop: threading.Event) -> None:
        """Work until told to stop; what is held then is given back. Outlives a store that is away."""
        self._stop = stop
        renewer = threading.Thread(target=self._renew, args=(stop,), name="lease-renewer", daemon=True)
        renewer.start()
        delay = self._settings.shadow.poll_s
        while not stop.is_set():
            try:
                delay = self._settings.shadow.poll_s if self.step() == 0 else 0.0
            except StoreError as error:
                self._interrupted = True
                delay = min(max(2 * delay, 1.0), 30.0)
                log.warning("%s; trying again in %.0f s", error, delay)
            except Stopped:
                break
            self.governor.idle(delay)
        renewer.join()
        try:
            with self._store.write() as session:
                work.release(session, self.owner)
        except StoreError as error:
            log.warning("%s; the leases run out by themselves", error)

    def step(self) -> int:
        """Judge one lease of tasks; the number judged."""
        with self._store.write() as session:
            if self._interrupted:  # what could not be handed in is renewed: nobody else would ever get it
                work.release(session, self.owner)
            tasks = work.lease(
                session, self.owner, now=time.time(), lease_s=self._settings.shadow.lease_s, limit=LEASE_ROWS
            )
        self._interrupted = False
        if not tasks:
            return 0
        verdicts = list(self.judge(tasks))
        with self._store.write() as session:
            work.complete(session, self.owner, verdicts, now=time.time())
            if len(verdicts) < len(tasks):
                work.release(session, self.owner, tried=True)
            if not self._settings.retention.text:
                work.forget_text(session)
        return len(verdicts)

    def _renew(self, stop: threading.Event) -> None:
        lease_s = self._settings.shadow.lease_s
        while not stop.wait(lease_s / 3):
            try:
                with self._store.write() as session:
                    work.renew(session, self.owner, now=time.time(), lease_s=lease_s)
            except StoreError as error:
                log.warning("%s; leases are not renewed", error)

    def judge(self, tasks: Sequence[Task]) -> Iterator[Verdict]:
        """One verdict for each task, in any order; none for tasks that the engine which gives hidden states fails."""
        groups: dict[tuple[str, str], list[tuple[Task, Tokens]]] = defaultdict(list)
        for task in tasks:
            tokens, skipped = self._tokens(task)
            model = self._settings.model_for(task.model)
            key = (model.name if model else "", task.draft)
            if tokens is None:
                yield Verdict(task, skipped=skipped)
            elif key in self._live_only:
                yield Verdict(task, skipped="no_target", retokenised=_kept(task, tokens))
            elif task.candidate is not None and not self._candidates.is_open(key, task, self._loads.get(key[0])):
                yield Verdict(task, skipped="candidate_refused", retokenised=_kept(task, tokens))
            elif key not in self._drafts:
                yield Verdict(task, skipped="unknown_draft", retokenised=_kept(task, tokens))
            else:
                groups[key].append((task, tokens))
        for key, group in groups.items():
            draft = self._drafts[key]
            samples = [tokens for _, tokens in group]
            sides = splits(self._sketches.get(key), samples)
            batch_tokens = self._settings.shadow.batch_tokens
            try:
                for result in replay(draft, samples, batch_tokens=batch_tokens, turn=self.governor.turn):
                    task, tokens = group[result.index]
                    figures = {} if result.weights is None else self._figures(key, task, tokens)
                    yield _verdict(task, tokens, draft, self._rules[key[0]], result, sides[result.index], figures)
                if self._trouble.pop(key, None):
                    log.info("draft %s of model %s is judged again", key[1], key[0])
            except ModelError as error:
                if self._trouble.get(key) != str(error):  # once a change, not once a look
                    log.warning("%s; its samples are tried again", error)
                self._trouble[key] = str(error)

    def _figures(self, key: tuple[str, str], task: Task, tokens: Tokens) -> dict[str, Any]:
        """Judged tokens that the draft cannot propose, and of a share of the samples the target's surprise."""
        draft, target = self._drafts[key], self._targets.get(key)
        known = {"outside": draft.outside(tokens.output[1:])} if isinstance(draft, Limited) else {}
        if target is None or not surprise.is_chosen(task.sample_id):
            return known
        with self.governor.turn():
            found = surprise.surprise(target, tokens)
        return known | (found.as_dict() if found else {})

    def _tokens(self, task: Task) -> tuple[Tokens | None, str | None]:
        if task.prompt_ids is not None and task.output_ids is not None:
            return _sampled(task, Tokens(task.prompt_ids, task.output_ids)), None
        if task.text is None:
            return None, "payload_expired"
        model = self._settings.model_for(task.model)
        if model is None or model.name not in self._tokenizers:
            return None, "no_tokenizer"
        tokens = self._tokenizers[model.name].tokens(task.text)
        return (_sampled(task, tokens), None) if tokens else (None, "template_refused")


def load_draft(
    spec: str | Path, tokenizer: Retokeniser | None, opening: Opening, target: Target | None = None
) -> Draft:
    """Load a draft and check it against the target's tokenizer. Raises ModelError if it does not fit."""
    draft = open_draft(spec, opening, target)
    if tokenizer is not None and not is_named(spec):
        vocabulary = None if draft.mapped else draft.fingerprint.vocabulary
        if misfit := tokenizer.misfit(folder_of(spec), vocabulary):
            raise ModelError(f"draft {spec} does not fit the target: {misfit}")
    return draft


def _sampled(task: Task, tokens: Tokens) -> Tokens:
    return replace(tokens, temperature=task.temperature, top_p=task.top_p, top_k=task.top_k)


def _kept(task: Task, tokens: Tokens) -> tuple[Sequence[int], Sequence[int]] | None:
    return (tokens.prompt, tokens.output) if task.prompt_ids is None else None


def _verdict(
    task: Task, tokens: Tokens, draft: Draft, rule: Rule, result: Result, split: Split, figures: dict[str, Any]
) -> Verdict:
    kept = _kept(task, tokens)
    if result.weights is None:
        return Verdict(task, skipped=result.skipped, retokenised=kept)
    weights = result.weights
    encoding, data = weights.encode()
    proposals = None if weights.proposals is None else weights.proposals.astype("<i2").tobytes()
    row = {
        "fingerprint": draft.fingerprint.sha256,
        "rule": rule,
        "split": split.side,
        "tokens": weights.tokens,
        "depths": weights.values.shape[1],
        "encoding": encoding,
        "weights": data,
        "proposals": proposals,
        "figures": (split.figures | figures) or None,
    }
    return Verdict(task, replay=row, retokenised=kept)
