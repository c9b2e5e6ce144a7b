"""What a draft is to the shadow: something that says, for served tokens, which of them it would have proposed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from driftwatch.acceptance import Weights
from driftwatch.errors import ModelError
from driftwatch.shadow.agreement import Agreement


@dataclass(frozen=True)
class Tokens:
    """One request as the target saw it: prompt and output token ids, and how the output was sampled, where known."""

    prompt: Sequence[int]
    output: Sequence[int]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    @property
    def judged(self) -> int:
        """Output tokens that a draft can be judged on: all but the first, which comes from prefill."""
        return len(self.output) - 1

    @property
    def length(self) -> int:
        """Tokens that a replay feeds: all but the last, which is only predicted."""
        return len(self.prompt) + len(self.output) - 1


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a draft: what it is, and a hash of its weights."""

    kind: str
    sha256: str
    parameters: int
    vocabulary: int
    path: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Fingerprinted(Protocol):
    """What has an identity."""

    @property
    def fingerprint(self) -> Fingerprint: ...


class Draft(Fingerprinted, Protocol):
    """A loaded draft."""

    @property
    def mapped(self) -> bool:
        """Whether it proposes the target's ids whatever the size of its own vocabulary."""

    def skip_reason(self, tokens: Tokens) -> str | None:
        """Why these tokens cannot be replayed, if they cannot."""

    def replay(self, batch: Sequence[Tokens]) -> list[Weights]:
        """Weights of each request under the draft's rule. Raises torch's out-of-memory error as it comes."""


@runtime_checkable
class Comparing(Protocol):
    """A draft that can be compared with its target beyond the rule, where the target is at hand."""

    def measure(self, batch: Sequence[Tokens]) -> list[tuple[Weights, Agreement | None]]:
        """As ``replay``, with the agreement figures where the draft was opened to give them."""


@runtime_checkable
class Limited(Protocol):
    """A draft with a vocabulary of its own."""

    def outside(self, ids: Sequence[int]) -> int:
        """How many of these token ids it cannot propose, whatever they follow on."""


def hash_weights(folder: Path) -> str:
    """SHA-256 over the weight files and the config, in order of name. Raises ModelError if there are no weights."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    if not files:
        raise ModelError(f"draft {folder}: no .safetensors or .bin weights in it")
    digest = hashlib.sha256()
    for path in [folder / "config.json", *files]:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
