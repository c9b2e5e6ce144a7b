"""transformers' own assisted generation, with all that it does around the passes: one sequence, a chain draft.

A pass is taken to last until the next pass begins, so that the parts add up to the time on the wall. What the loop does
to set up and wind up a run of proposals is no proposal's: it counts with the verification.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from driftwatch.shadow.profile.loop import Lap

WINDOWS = 6
"""Windows, or plain steps, a call; the first holds the prefill, the last the end of the generation."""


@dataclass(frozen=True)
class _Mark:
    """A pass began: whose, and over how many tokens."""

    drafting: bool
    tokens: int
    at: float


class Assisted:
    """``generate`` of a model, plain or with an assistant that proposes a constant number of tokens."""

    most_sequences = 1

    def __init__(
        self, model: Any, assistant: Any | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """``clock``: in seconds; a process's own time where it is one thread that others may not stretch."""
        self._model, self._assistant, self._clock = model, assistant, clock
        self._draft_s: float | None = None

    def laps(self, batch: int, context: int, gamma: int) -> list[Lap]:
        device = self._model.device
        ids = torch.arange(context, device=device)[None] % len(self._model.get_input_embeddings().weight)
        count = WINDOWS * (1 + gamma) + 2
        with self._marked() as marks:
            generate(self._model, ids, count, self._assistant if gamma else None, gamma)
        return list(self._laps(marks, gamma))

    def _laps(self, marks: list[_Mark], gamma: int) -> Iterator[Lap]:
        starts = [i for i, mark in enumerate(marks) if not mark.drafting]
        for here, there in pairwise(starts[1:]):  # from one verification to the next
            window = marks[there].at - marks[here].at
            if marks[here].tokens != 1 + gamma or there - here != 1 + gamma:
                continue
            if gamma == 0:
                yield Lap(window)
                continue
            drafts = [b.at - a.at for a, b in pairwise(marks[here + 1 : there])]
            if drafts:
                self._draft_s = median(drafts)
            each = self._draft_s if self._draft_s is not None else marks[there].at - marks[there - 1].at
            yield Lap(window - gamma * each, drafts or [each])

    @contextmanager
    def _marked(self) -> Iterator[list[_Mark]]:
        """Note when passes of the two models begin."""
        marks: list[_Mark] = []
        hooks = []
        for model, drafting in ((self._model, False), (self._assistant, True)):
            if model is None:
                continue

            def begin(_: Any, arguments: Any, options: Any, drafting: bool = drafting) -> None:
                ids = arguments[0] if arguments else options["input_ids"]
                marks.append(_Mark(drafting, int(ids.shape[1]), self._clock()))

            hooks.append(model.register_forward_pre_hook(begin, with_kwargs=True))
        try:
            yield marks
        finally:
            for hook in hooks:
                hook.remove()


def generate(
    model: Any, ids: torch.Tensor, count: int, assistant: Any | None, gamma: int, **options: Any
) -> torch.Tensor:
    """``count`` greedy tokens after [1, context] ids, with ``gamma`` proposals a window where there is an assistant."""
    if assistant is not None:
        settings = assistant.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = gamma, "constant"
        settings.assistant_confidence_threshold = 0
        options["assistant_model"] = assistant
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about its own names
        found: torch.Tensor = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
    return found
