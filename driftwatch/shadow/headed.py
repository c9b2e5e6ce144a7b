"""What all drafts share that read their target's hidden states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from driftwatch.acceptance import Rule, Weights
from driftwatch.shadow.agreement import Agreement
from driftwatch.shadow.draft import Fingerprint, Tokens
from driftwatch.shadow.figures import skip_reason
from driftwatch.shadow.judge import VocabularyMap
from driftwatch.shadow.states.source import States


class HeadedDraft(ABC):
    """A head on its target. Whoever derives from it sets these."""

    fingerprint: Fingerprint
    rule: Rule
    states: States
    """Where the target's hidden states come from."""
    embedding: torch.Tensor
    """[token ids, width] that the head is fed from."""
    _map: VocabularyMap

    @abstractmethod
    def measure(self, batch: Sequence[Tokens]) -> list[tuple[Weights, Agreement | None]]:
        """Weights of each request, and the agreement figures where they were asked for."""

    def replay(self, batch: Sequence[Tokens]) -> list[Weights]:
        return [weights for weights, _ in self.measure(batch)]

    @property
    def mapped(self) -> bool:
        return self._map.to_target is not None

    def outside(self, ids: Sequence[int]) -> int:
        return self._map.outside(ids, self.fingerprint.vocabulary)

    def skip_reason(self, tokens: Tokens) -> str | None:
        return skip_reason(tokens, min(len(self.embedding), self.states.token_ids), self.rule, self.states.positions)
