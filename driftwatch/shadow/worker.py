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
from pathlib import Path

import torch

from driftwatch.errors import ModelError, SettingsError, StoreError
from driftwatch.settings import Settings
from driftwatch.shadow.chain import ChainDraft
from driftwatch.shadow.device import pick_device, pick_dtype
from driftwatch.shadow.draft import Draft, Tokens
from driftwatch.shadow.replay import Result, replay
from driftwatch.shadow.tokenizer import Retokeniser
from driftwatch.store import work
from driftwatch.store.connection import Store
from driftwatch.store.work import Task, Verdict

log = logging.getLogger(__name__)

LEASE_ROWS = 64


class Worker:
    """One shadow process. Loads every configured draft at once, so that a bad one is known before work is taken.

    Raises ModelError or SettingsError when a draft cannot be used.
    """

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        if settings.shadow.threads is not None:
            torch.set_num_threads(settings.shadow.threads)
        device = pick_device(settings.shadow.device)
        dtype = pick_dtype(settings.shadow.dtype, device)
        self._drafts: dict[tuple[str, str], Draft] = {}
        self._tokenizers: dict[str, Retokeniser] = {}
        for model in settings.models:
            if folder := model.tokenizer or model.target:
                self._tokenizers[model.name] = Retokeniser(Path(folder))
            for draft in model.drafts:
                if draft.path is not None:
                    loaded = load_draft(Path(draft.path), self._tokenizers.get(model.name), device=device, dtype=dtype)
                    self._drafts[model.name, draft.name] = loaded
        if not self._drafts:
            raise SettingsError("`models[].drafts[].path`: no draft has a path, so the shadow has nothing to do")
        log.info("shadow on %s (%s), drafts: %s", device, dtype, ", ".join(name for _, name in self._drafts))

    def run(self, stop: threading.Event) -> None:
        """Work until told to stop; what is held then is given back. Outlives a store that is away."""
        renewer = threading.Thread(target=self._renew, args=(stop,), name="lease-renewer", daemon=True)
        renewer.start()
        delay = self._settings.shadow.poll_s
        while not stop.is_set():
            try:
                delay = self._settings.shadow.poll_s if self.step() == 0 else 0.0
            except StoreError as error:
                delay = min(max(2 * delay, 1.0), 30.0)
                log.warning("%s; trying again in %.0f s", error, delay)
            stop.wait(delay)
        renewer.join()
        try:
            with self._store.write() as session:
                work.release(session, self.owner)
        except StoreError as error:
            log.warning("%s; the leases run out by themselves", error)

    def step(self) -> int:
        """Judge one lease of tasks; the number judged."""
        with self._store.write() as session:
            tasks = work.lease(
                session, self.owner, now=time.time(), lease_s=self._settings.shadow.lease_s, limit=LEASE_ROWS
            )
        if not tasks:
            return 0
        verdicts = list(self.judge(tasks))
        with self._store.write() as session:
            work.complete(session, self.owner, verdicts, now=time.time())
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
        """One verdict for each task, in any order."""
        groups: dict[tuple[str, str], list[tuple[Task, Tokens]]] = defaultdict(list)
        for task in tasks:
            tokens, skipped = self._tokens(task)
            model = self._settings.model_for(task.model)
            key = (model.name if model else "", task.draft)
            if tokens is None:
                yield Verdict(task, skipped=skipped)
            elif key not in self._drafts:
                yield Verdict(task, skipped="unknown_draft", retokenised=_kept(task, tokens))
            else:
                groups[key].append((task, tokens))
        for key, group in groups.items():
            draft = self._drafts[key]
            samples = [tokens for _, tokens in group]
            for result in replay(draft, samples, batch_tokens=self._settings.shadow.batch_tokens):
                task, tokens = group[result.index]
                yield _verdict(task, tokens, draft, result)

    def _tokens(self, task: Task) -> tuple[Tokens | None, str | None]:
        if task.prompt_ids is not None and task.output_ids is not None:
            return Tokens(task.prompt_ids, task.output_ids), None
        if task.text is None:
            return None, "payload_expired"
        model = self._settings.model_for(task.model)
        if model is None or model.name not in self._tokenizers:
            return None, "no_tokenizer"
        tokens = self._tokenizers[model.name].tokens(task.text)
        return tokens, None if tokens else "template_refused"


def load_draft(folder: Path, tokenizer: Retokeniser | None, *, device: torch.device, dtype: torch.dtype) -> ChainDraft:
    """Load a draft and check it against the target's tokenizer. Raises ModelError if it does not fit."""
    draft = ChainDraft.load(folder, device=device, dtype=dtype)
    vocabulary = None if draft.mapped else draft.fingerprint.vocabulary
    if tokenizer is not None and (misfit := tokenizer.misfit(folder, vocabulary)):
        raise ModelError(f"draft {folder} does not fit the target: {misfit}")
    return draft


def _kept(task: Task, tokens: Tokens) -> tuple[Sequence[int], Sequence[int]] | None:
    return (tokens.prompt, tokens.output) if task.prompt_ids is None else None


def _verdict(task: Task, tokens: Tokens, draft: Draft, result: Result) -> Verdict:
    kept = _kept(task, tokens)
    if result.weights is None:
        return Verdict(task, skipped=result.skipped, retokenised=kept)
    weights = result.weights
    encoding, data = weights.encode()
    proposals = None if weights.proposals is None else weights.proposals.astype("<i2").tobytes()
    row = {
        "fingerprint": draft.fingerprint.sha256,
        "rule": "argmax",
        "split": "none",
        "tokens": weights.tokens,
        "depths": weights.values.shape[1],
        "encoding": encoding,
        "weights": data,
        "proposals": proposals,
    }
    return Verdict(task, replay=row, retokenised=kept)
