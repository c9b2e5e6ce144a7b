"""Chain drafts against transformers' own speculative decoding, which decodes where the replay reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation import candidate_generator

from driftwatch.acceptance import accepted_per_window
from driftwatch.shadow.causal import load_model
from driftwatch.shadow.chain import ChainDraft
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.target import Target

from .conftest import CPU, DATA, tokens_of, trace

TOKENS = 48


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("gamma", [3, 5])
def test_accepted_counts_of_assisted_generation(target: Target, gamma: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drafts from the first new token on, so it is fed prompt + y[1]; its number of proposals is held constant."""
    model = target.model().model
    chain = ChainDraft.load(DATA / "models" / "chain", device=CPU, dtype=torch.float32)
    assistant = load_model("draft", DATA / "models" / "chain", device=CPU, dtype=torch.float32)
    assistant.generation_config.num_assistant_tokens = gamma
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0
    counts: list[int] = []
    update = candidate_generator.AssistedCandidateGenerator.update_candidate_strategy

    def recording(self: Any, input_ids: Any, scores: Any, num_matches: int) -> Any:
        counts.append(int(num_matches))
        return update(self, input_ids, scores, num_matches)

    monkeypatch.setattr(candidate_generator.AssistedCandidateGenerator, "update_candidate_strategy", recording)
    compared = 0
    for record in trace("draft3.T0")[::6]:
        prompt = list(tokens_of(record).prompt)
        ids = torch.tensor([prompt])
        options: Any = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            first = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, **options)
            counts.clear()
            out = model.generate(
                first,
                attention_mask=torch.ones_like(first),
                assistant_model=assistant,
                max_new_tokens=TOKENS,
                **options,
            )[0].tolist()
        (weights,) = chain.replay([Tokens(prompt, out[len(prompt) :])])
        replayed = accepted_per_window(weights, gamma)
        assert replayed[:-1] == counts[: len(replayed) - 1]  # the last window is cut differently
        assert len(counts) == len(replayed)
        compared += len(replayed) - 1
    print(f"gamma {gamma}: {compared} windows of assisted generation compared, all equal")
    assert compared > 150
