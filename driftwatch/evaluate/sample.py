"""The requests of an evaluation, from records; the drafts that are judged on them, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from driftwatch.acceptance import tally
from driftwatch.economics.profile import CostProfile
from driftwatch.errors import DriftwatchError
from driftwatch.evaluate.candidate import Draft
from driftwatch.evaluate.request import ALL, Clock, Request
from driftwatch.records import Record, read_records, segment_id
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.history import Outcome, replay_records, tokens_of
from driftwatch.shadow.lookahead.method import parse as parse_lookahead
from driftwatch.shadow.lookahead.share import choose, decode_records
from driftwatch.shadow.ngram import parse as parse_ngram
from driftwatch.shadow.open import Opening
from driftwatch.shadow.target import Target
from driftwatch.shadow.tokenizer import Retokeniser
from driftwatch.shadow.worker import load_draft

NGRAM = "ngram:min=2,max=4"
LOOKAHEAD = "lookahead:window=5,ngram=3,guesses=5,requests=20"
"""On so few records, since the target decodes them again."""

Progress = Callable[[str, int], object]


class Sample:
    """Requests by their place in the files. ``skipped`` counts, by draft, what could not be judged; under ``records``
    what is no part of the sample at all."""

    def __init__(self, files: Sequence[Path], by: Sequence[str], tokenizer: Retokeniser | None) -> None:
        """Reads the files once. Raises RecordError for a bad line, DriftwatchError if nothing is left of them."""
        self._files, self._tokenizer = files, tokenizer
        self.skipped: dict[str, Counter[str]] = {}
        self._requests: dict[int, Request] = {}
        for place, record in enumerate(self._records()):
            tokens = "mining" if record.purpose != "estimate" else tokens_of(record, tokenizer)
            if isinstance(tokens, str) or tokens.judged < 1:
                self._skip("records", tokens if isinstance(tokens, str) else "too_short")
            else:
                self._requests[place] = _request(record, tokens, by)
        if not self._requests:
            reasons = ", ".join(f"{reason} ({n})" for reason, n in self.skipped.get("records", Counter()).items())
            raise DriftwatchError(f"no request to evaluate: {reasons or 'the files hold no records'}")

    @property
    def requests(self) -> list[Request]:
        return list(self._requests.values())

    def clocked(self, place: int, mode: str, clock: Clock) -> None:
        """Add what an engine took for the request at a place: ``plain`` or ``speculative``."""
        held = self._requests[place]
        speculative = mode == "speculative"
        self._requests[place] = replace(held, speculative=clock) if speculative else replace(held, plain=clock)

    def share(self, limit: int) -> list[tuple[int, Record, int]]:
        """At most so many records with their places and answer lengths: the same ones in every run."""
        places: dict[str, int] = {}
        for place, record in self._held():
            places.setdefault(record.id, place)
        chosen, _ = choose((record for _, record in self._held()), limit)
        unique = {record.id: record for record in chosen}
        return [(places[id], record, self._requests[places[id]].tokens + 1) for id, record in unique.items()]

    def _held(self) -> Iterator[tuple[int, Record]]:
        return ((place, record) for place, record in enumerate(self._records()) if place in self._requests)

    def trained(
        self, spec: str, opening: Opening, target: Target | None, profile: CostProfile | None, progress: Progress
    ) -> Draft:
        """Replay a draft that was trained. Raises ModelError if it cannot be used."""
        draft = load_draft(spec, self._tokenizer, opening, target)
        self._replay(spec, draft, opening, progress)
        return Draft(spec, "trained", profile)

    def ngram(self, spec: str, opening: Opening, profile: CostProfile | None, progress: Progress) -> Draft:
        """Replay prompt lookup, which costs an engine next to nothing."""
        self._replay(spec, parse_ngram(spec, opening.depths, opening.rule), opening, progress)
        return Draft(spec, "ngram", None if profile is None else profile.with_draft(0.0))

    def lookahead(self, spec: str, target: Target, profile: CostProfile | None, progress: Progress) -> Draft:
        """Decode a small share again, greedily, with the target itself."""
        method = parse_lookahead(spec)
        chosen = {record.id: (place, record) for place, record, _ in self.share(method.requests)}
        fed = steps = 0.0
        records = [record for _, record in chosen.values()]
        for outcome in decode_records(target, records, method, tokenizer=self._tokenizer):
            progress(spec, len(chosen))
            if outcome.weights is None:
                self._skip(spec, outcome.skipped or "unknown")
                continue
            self._add(chosen[outcome.record.id][0], spec, outcome, method.gamma)
            fed += outcome.fed
            steps += float(tally(outcome.weights, method.gamma).steps[-1])
        per_step = fed / steps if steps else None
        return Draft(spec, "lookahead", None if profile is None else profile.with_draft(0.0), per_step, len(chosen))

    def _replay(self, name: str, draft: Any, opening: Opening, progress: Progress) -> None:
        outcomes = replay_records(
            draft, self._records(), batch_tokens=opening.prefill_tokens, tokenizer=self._tokenizer
        )
        for place, outcome in enumerate(outcomes):
            progress(name, len(self._requests))
            if place not in self._requests:
                continue
            if outcome.weights is None:
                self._skip(name, outcome.skipped or "unknown")
            else:
                self._add(place, name, outcome, opening.depths)

    def _add(self, place: int, name: str, outcome: Outcome, gamma: int) -> None:
        assert outcome.weights is not None
        held = self._requests[place]
        self._requests[place] = replace(held, tallies={**held.tallies, name: tally(outcome.weights, gamma)})

    def _records(self) -> Iterator[Record]:
        return read_records(self._files)

    def _skip(self, name: str, reason: str) -> None:
        self.skipped.setdefault(name, Counter())[reason] += 1


def _request(record: Record, tokens: Tokens, by: Iterable[str]) -> Request:
    labels = {label: record.labels.get(label, "none") for label in by}
    return Request(
        record.id,
        segment_id(labels) if labels else ALL,
        tokens.judged,
        len(tokens.prompt) + len(tokens.output) / 2.0,
        record.weight,
        record.session,
        _recorded(record, tokens.judged),
        retokenised=not record.has_ids,
    )


def _recorded(record: Record, tokens: int) -> Clock | None:
    """Only where the record says both parts of the time."""
    timing = record.timing
    if timing is None or timing.ttft_s is None:
        return None
    decode = timing.tpot_s * tokens if timing.tpot_s is not None else None
    if decode is None and timing.e2e_s is not None:
        decode = timing.e2e_s - timing.ttft_s
    return None if decode is None or decode <= 0.0 else Clock(timing.ttft_s, decode, tokens)
