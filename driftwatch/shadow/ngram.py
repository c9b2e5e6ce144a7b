"""Prompt lookup: the draft is the request's own text, so its replay needs neither a model nor a target.

The rule is vLLM's ``method: ngram`` (``vllm/v1/spec_decode/ngram_proposer.py``): of the context, prompt and served
tokens alike, take the longest suffix of ``min`` to ``max`` tokens that occurred before, its EARLIEST earlier occurrence
(the two may overlap), and propose up to gamma tokens that follow it; fewer where the context ends, none where nothing
matched. A step without a proposal is a plain step. Since the match does not depend on gamma, the proposals for a
smaller gamma are the first of those for a larger one: one replay gives them all.

Only within gamma tokens of its ``max_model_len`` does vLLM propose fewer than here; those tokens cannot be served.

SGLang's NGRAM is judged live only: it drafts a tree from one trie that all requests of a server share, filled in the
background and evicted by last use, so what it proposes depends on traffic and timing that no request records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from driftwatch.acceptance import DEFAULT_GAMMA, Rule, Weights
from driftwatch.errors import ModelError
from driftwatch.shadow.draft import Fingerprint, Tokens

KIND = "ngram"
LONGEST = 128
"""The longest suffix that may be asked for; each length costs one pass over the tokens."""


class NgramDraft:
    """Prompt lookup of suffixes of ``shortest`` to ``longest`` tokens, ``gamma`` proposals at most."""

    mapped = True  # it proposes what the request holds: any vocabulary fits

    def __init__(self, shortest: int, longest: int, gamma: int = DEFAULT_GAMMA, rule: Rule = "argmax") -> None:
        """Raises ValueError unless 1 <= shortest <= longest and 1 <= gamma."""
        if not (1 <= shortest <= longest and gamma >= 1):
            raise ValueError(f"no prompt lookup has min {shortest}, max {longest}, gamma {gamma}")
        self._shortest = shortest
        self._longest = longest
        self._gamma, self._rule = gamma, rule
        self.fingerprint = modelless_fingerprint(KIND, {"min": shortest, "max": longest})

    def skip_reason(self, tokens: Tokens) -> str | None:
        """A sample whose sampling is unknown is none that the rejection rule judges, whatever it would say of it."""
        if tokens.judged < 1:
            return "too_short"
        return "sampling_unknown" if self._rule == "rejection" and tokens.temperature is None else None

    def replay(self, batch: Sequence[Tokens]) -> list[Weights]:
        """Weights of each request, with the number of proposals at each start.

        Both rules give the same: a proposal that is certain, q = 1, is accepted where it was emitted, and only there.
        """
        return [self._replay(tokens) for tokens in batch]

    def propose(self, context: Sequence[int]) -> list[int]:
        """What an engine would propose after this context."""
        begin = int(self._begins(np.array(context, np.int64))[-1])
        return list(context[begin : begin + self._gamma])

    def _replay(self, tokens: Tokens) -> Weights:
        ids = np.array([*tokens.prompt, *tokens.output], np.int64)
        starts = np.arange(len(tokens.prompt) + 1, len(ids))  # a context is all before its judged token, y[1] included
        begins = self._begins(ids)[starts - 1]
        proposals = np.minimum(starts - begins, self._gamma)
        depth = np.arange(self._gamma)
        proposed = ids[np.minimum(begins[:, None] + depth, len(ids) - 1)]
        judged = starts[:, None] + depth
        hits = (judged < len(ids)) & (depth < proposals[:, None]) & (proposed == ids[np.minimum(judged, len(ids) - 1)])
        return Weights(hits.astype(np.float64), proposals)

    def _begins(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """[tokens]: index of the first proposal after the context that ends there; the context's end if none."""
        ends = np.arange(len(ids))
        begins = ends + 1
        for size, first in enumerate(_first_ends(ids, self._longest), 1):
            repeats = first < ends
            if not repeats.any():  # then no longer n-gram does either
                break
            if size >= self._shortest:
                begins = np.where(repeats, first + 1, begins)
        return begins


def _first_ends(ids: NDArray[np.int64], longest: int) -> Iterator[NDArray[np.int64]]:
    """For n = 1 to ``longest``, [tokens]: where the n-gram that ends at each token ended for the first time.

    An n-gram is told from all others by the first end of its leading n - 1 tokens and its last token: one hash look-up
    a token, however long the n-gram.
    """
    base = int(ids.max()) + 1
    first = np.zeros(len(ids), np.int64)  # the empty n-gram
    for size in range(1, longest + 1):
        keys = first[size - 2 : -1] * base + ids[size - 1 :] if size > 1 else ids
        seen: dict[int, int] = {}
        first = np.arange(len(ids))
        first[size - 1 :] = [seen.setdefault(key, end) for end, key in enumerate(keys.tolist(), size - 1)]
        yield first


def parse(spec: str, gamma: int = DEFAULT_GAMMA, rule: Rule = "argmax") -> NgramDraft:
    """``ngram:min=1,max=3``. Raises ModelError with one line that names the key and its value.

    Both are asked for: vLLM takes a missing one from the other, its documentation takes min for 1.
    """
    found = parameters(spec, KIND, {"min": (1, LONGEST), "max": (1, LONGEST)})
    if found["min"] > found["max"]:
        raise ModelError(f"draft {spec}: `min` is {found['min']}, more than `max` = {found['max']}")
    return NgramDraft(found["min"], found["max"], gamma, rule)


def parameters(
    spec: str, kind: str, ranges: Mapping[str, tuple[int, int]], defaults: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Whole numbers in the name of a draft: ``kind:key=value,...``, in the order of ``ranges``.

    Raises ModelError with one line for an unknown, repeated, missing or impossible one.
    """
    body = spec.removeprefix(kind).removeprefix(":")
    if spec not in (kind, f"{kind}:{body}"):
        raise ModelError(f"draft {spec}: not a draft of kind {kind}; write {_example(kind, ranges)}")
    given: dict[str, int] = {}
    for part in body.split(",") if body else []:
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in ranges:
            raise ModelError(f"draft {spec}: `{key}` is no parameter of it; write {_example(kind, ranges)}")
        if key in given:
            raise ModelError(f"draft {spec}: `{key}` is given twice, the second time as {value!r}")
        given[key] = _whole(spec, key, value, *ranges[key])
    given = {**(defaults or {}), **given}
    if missing := [key for key in ranges if key not in given]:
        raise ModelError(f"draft {spec}: `{missing[0]}` is missing; write {_example(kind, ranges)}")
    return {key: given[key] for key in ranges}


def _whole(spec: str, key: str, value: str, low: int, high: int) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and low <= int(value) <= high):
        raise ModelError(f"draft {spec}: `{key}` is {value!r}; give a whole number from {low} to {high}")
    return int(value)


def _example(kind: str, ranges: Mapping[str, tuple[int, int]]) -> str:
    return f"{kind}:" + ",".join(f"{key}=N" for key in ranges)


def modelless_fingerprint(kind: str, values: Mapping[str, int]) -> Fingerprint:
    """Identity of a draft without weights: its parameters in one fixed spelling. Vocabulary 0 stands for any."""
    canonical = f"{kind}:" + ",".join(f"{key}={value}" for key, value in values.items())
    return Fingerprint(kind, hashlib.sha256(canonical.encode()).hexdigest(), 0, 0, canonical)
