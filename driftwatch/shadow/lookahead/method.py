"""The parameters of lookahead decoding, as they are named on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from driftwatch.shadow.draft import Fingerprint
from driftwatch.shadow.ngram import modelless_fingerprint, parameters

KIND = "lookahead"
RANGES = {"window": (1, 256), "ngram": (2, 32), "guesses": (1, 256), "prompt": (0, 1), "requests": (1, 100_000)}
REQUESTS = 50
"""Records that are decoded again unless more or fewer are asked for."""


@dataclass(frozen=True)
class Lookahead:
    """Window size W, n-gram size N, guess-set size G, whether prompt and output fill the pool as well, and on how many
    records it is tried."""

    window: int
    ngram: int
    guesses: int
    prompt: bool = False
    requests: int = REQUESTS

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the method alone, on however many records it is tried."""
        values = {"window": self.window, "ngram": self.ngram, "guesses": self.guesses, "prompt": int(self.prompt)}
        return modelless_fingerprint(KIND, values)

    @property
    def gamma(self) -> int:
        """Proposals of a window: an n-gram's tokens behind its first."""
        return self.ngram - 1


def is_lookahead(spec: str) -> bool:
    """Whether a draft is given as ``lookahead:...``."""
    return spec.partition(":")[0] == KIND


def parse(spec: str) -> Lookahead:
    """``lookahead:window=5,ngram=3,guesses=5[,prompt=1][,requests=50]``.

    Raises ModelError with one line that names key and value.
    """
    found = parameters(spec, KIND, RANGES, {"prompt": 0, "requests": REQUESTS})
    return Lookahead(found["window"], found["ngram"], found["guesses"], bool(found["prompt"]), found["requests"])
