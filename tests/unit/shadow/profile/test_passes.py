"""The passes that are timed are the passes of a real decode: same choices, same caches."""

from __future__ import annotations

import torch

from driftwatch.shadow.causal import Causal, load_model
from driftwatch.shadow.eagle3.checkpoint import Checkpoint
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.profile.heads import Eagle3Passes
from driftwatch.shadow.profile.passes import STEPS, Cached, Passes
from driftwatch.shadow.target import Target
from tests.unit.shadow.conftest import CPU, DATA


def chain() -> Causal:
    return Causal(load_model("draft", DATA / "models" / "chain", device=CPU, dtype=torch.float32))


@torch.inference_mode()
def test_a_step_on_the_cache_chooses_what_a_whole_pass_chooses(target: Target) -> None:
    causal = target.model()
    cached = Cached(causal)
    fed = torch.tensor([[5, 6, 7], [8, 9, 10]])
    context = torch.arange(12).repeat(2, 1) % cached.vocabulary
    whole = causal.model(input_ids=torch.cat([context, fed], dim=1), use_cache=False).logits[:, 12:].argmax(dim=-1)
    cached.begin(2, 12)
    for _ in range(2):  # a second step begins at the same context
        choices, states = cached.step(fed, (1, 3))
        assert torch.equal(choices, whole)
        assert [state.shape for state in states] == [(2, 3, causal.hidden)] * 2
        cached.rewind()


@torch.inference_mode()
def test_single_proposals_are_those_of_a_whole_pass() -> None:
    causal = chain()
    cached = Cached(causal)
    fed = torch.tensor([[4, 5, 6]])
    whole = causal.model(input_ids=torch.cat([torch.arange(9)[None], fed], dim=1)).logits[:, 9:].argmax(dim=-1)
    cached.begin(1, 9)
    proposed = torch.cat([cached.propose(fed[:, i : i + 1]) for i in range(3)], dim=1)
    assert torch.equal(proposed, whole)


def test_a_window_is_gamma_proposals_and_one_verification(target: Target) -> None:
    loop = Passes(target.model(), Cached(chain()))
    for gamma in (0, 1, 4):
        laps = loop.laps(3, 20, gamma)
        assert len(laps) == STEPS
        assert all(len(lap.drafts) == gamma and min(lap.verify, *lap.drafts, 1.0) > 0.0 for lap in laps)


@torch.inference_mode()
def test_an_eagle3_pass_is_that_of_the_replay(target: Target, eagle3: Checkpoint) -> None:
    """One proposal on real keys and states is the head's own first proposal."""
    draft = Eagle3Draft(eagle3, target, depths=1)
    passes = Eagle3Passes(draft)
    ids = torch.arange(20, 41)[None]
    states = [
        target.model().model(input_ids=ids[:, :-1], output_hidden_states=True).hidden_states[i] for i in draft.layers
    ]
    projected = draft.head.project(states)[0]
    head, embedding = draft.head, draft.embedding
    # Row s holds state s with token s + 1; the last row proposes.
    keys = head.context(embedding[ids[0, 1:-1]], projected[:-1], torch.arange(19) + passes._first)
    passes.begin(1, 19)
    passes._keys, passes._values, passes._hidden = keys.keys[None], keys.values[None], projected[-1:]
    proposed = int(passes.propose(ids[:, -1:]))
    query, own = head.query(embedding[ids[0, -1:]], projected[-1:], torch.tensor([19 + passes._first]), keys=True)
    assert own is not None
    scores = torch.einsum("hrd,hkd->hrk", query, torch.cat([keys.keys, own.keys], dim=1)) * head.spec.head_dim**-0.5
    mixed = torch.einsum("hrk,hkd->rhd", scores.softmax(dim=-1), torch.cat([keys.values, own.values], dim=1))
    expected = int(head.logits(head.finish(projected[-1:], mixed.reshape(1, -1))).argmax())
    assert proposed == expected


def test_eagle3_windows_on_a_batch(target: Target, eagle3: Checkpoint) -> None:
    loop = Passes(target.model(), Eagle3Passes(Eagle3Draft(eagle3, target, depths=1)))
    for batch, context in ((1, 8), (3, 8), (3, 16)):
        assert all(len(lap.drafts) == 2 for lap in loop.laps(batch, context, 2))
