"""Both acceptance rules against speculative sampling that is really carried out, and against a real engine's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from driftwatch.acceptance import Rule, Weights, tally
from driftwatch.shadow.chain import ChainDraft
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.eagle3.checkpoint import Checkpoint
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.judge import TargetRows, VocabularyMap, judge
from driftwatch.shadow.replay import replay
from driftwatch.shadow.target import Target
from driftwatch.shadow.warp import Sampling

from .conftest import CPU, DATA, tokens_of, trace

VOCABULARY, MEMBERS = 6, [0, 2, 3, 5]
SETTINGS = (0.8, 0.9, 5)


class Pair:
    """A target and a draft of one token's memory, the draft over a part of the vocabulary."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.target = rng.normal(size=(VOCABULARY, VOCABULARY)) * 1.2
        self.draft = self.target[:, MEMBERS] + rng.normal(size=(VOCABULARY, len(MEMBERS))) * 0.8

    def p(self, last: int) -> NDArray[np.float64]:
        temperature, top_p, top_k = SETTINGS
        scaled = self.target[last] / temperature
        scaled = np.where(scaled >= np.sort(scaled)[-top_k], scaled, -np.inf)
        p = np.exp(scaled - scaled.max())
        p /= p.sum()
        order = np.argsort(-p)
        p[order[np.cumsum(p[order]) - p[order] >= top_p]] = 0
        found: NDArray[np.float64] = p / p.sum()
        return found

    def q(self, last: int, rule: Rule) -> NDArray[np.float64]:
        found = np.zeros(VOCABULARY)
        if rule == "argmax":
            found[MEMBERS[int(self.draft[last].argmax())]] = 1
        else:
            found[MEMBERS] = torch.tensor(self.draft[last] / SETTINGS[0]).softmax(-1).numpy()
        return found


def decode(pair: Pair, rule: Rule, gamma: int, count: int, seed: int) -> tuple[list[int], NDArray[np.int64], int]:
    """Speculative sampling as in the paper: tokens, accepted by depth, windows."""
    rng = np.random.default_rng(seed)
    tables = [pair.p(i) for i in range(VOCABULARY)], [pair.q(i, rule) for i in range(VOCABULARY)]
    out, accepted, windows = [0], np.zeros(gamma, np.int64), 0
    while len(out) < count:
        windows += 1
        for depth in range(gamma):
            p, q = tables[0][out[-1]], tables[1][out[-1]]
            proposal = int(rng.choice(VOCABULARY, p=q))
            if rng.random() * q[proposal] <= p[proposal]:
                accepted[depth] += 1
                out.append(proposal)
                continue
            rest = np.maximum(p - q, 0)
            out.append(int(rng.choice(VOCABULARY, p=rest / rest.sum())))
            break
        else:
            out.append(int(rng.choice(VOCABULARY, p=tables[0][out[-1]])))
    return out, accepted, windows


def judged(pair: Pair, rule: Rule, out: list[int]) -> NDArray[np.float64]:
    """Weights of the decoded tokens by the functions that every replay uses."""
    last, served = torch.tensor(out[:-1]), torch.tensor(out[1:])
    sampling = Sampling.of([SETTINGS], [len(served)])
    mapping = VocabularyMap(torch.tensor(MEMBERS), CPU)
    target = TargetRows.of(torch.tensor(pair.target)[last], served, sampling, full=False)
    logits = torch.tensor(pair.draft)[last]
    found: NDArray[np.float64] = (
        judge(logits, served, mapping, rule=rule, target=target, sampling=sampling).weight.double().numpy()
    )
    return found


@pytest.mark.parametrize("rule", ["argmax", "rejection"])
@pytest.mark.parametrize("gamma", range(1, 9))
def test_simulated_speculative_sampling(rule: Rule, gamma: int) -> None:
    """The engine speculates with this very draft; its counts are what the replay of its tokens expects."""
    pair = Pair(gamma)
    out, accepted, windows = decode(pair, rule, gamma, 12_000, seed=gamma)
    counts = tally(Weights(judged(pair, rule, out)[:, None]), gamma)
    print(f"{rule}, gamma {gamma}: {windows} windows, replay {counts.windows[-1]:.1f}, {len(out) - 1} tokens")
    if rule == "argmax":
        assert abs(counts.windows[-1] - windows) <= 1  # the last window may run past the end
        np.testing.assert_allclose(counts.accepted_at[-1], accepted, atol=1)
    else:
        assert counts.windows[-1] == pytest.approx(windows, abs=4 * windows**0.5)
        np.testing.assert_allclose(counts.accepted_at[-1], accepted, atol=4 * windows**0.5)


def walks(weights: NDArray[np.float64], gamma: int, rng: np.random.Generator) -> tuple[int, NDArray[np.int64]]:
    """One possible run of an engine that emitted these tokens: windows, and accepted by depth."""
    hits = rng.random(len(weights)) < weights
    windows, accepted, i = 0, np.zeros(gamma, np.int64), 0
    while i < len(hits):
        windows += 1
        depth = 0
        while depth < gamma and i < len(hits) and hits[i]:
            accepted[depth] += 1
            depth, i = depth + 1, i + 1
        i += 1
    return windows, accepted


def test_a_real_engine_that_samples_its_proposals() -> None:
    """vLLM with draft_sample_method probabilistic: windows and accepted by depth within three standard deviations of
    what the replay predicts; proposals beyond the last served token are left out of the engine's counts."""
    target = Target(DATA / "models" / "target", device=CPU, dtype=torch.float32)
    chain = ChainDraft.load(
        DATA / "models" / "chain", device=CPU, dtype=torch.float32, target=target, rule="rejection", agreement=True
    )
    records = trace("draft3prob.T0.8")
    results = list(replay(chain, [tokens_of(record) for record in records], batch_tokens=8192))
    assert sorted(result.index for result in results) == list(range(len(records)))
    weights = {result.index: result.weights for result in results}
    rng = np.random.default_rng(0)
    for domain in "AB":
        chosen = [i for i, record in enumerate(records) if record.labels["domain"] == domain]
        values = []
        windows, accepted, tokens = 0, np.zeros(3), 0
        for i in chosen:
            one, engine = weights[i], records[i].engine
            assert one is not None
            assert engine is not None
            assert engine.accepted_per_window is not None
            values.append(one.values[:, 0])
            tokens += one.tokens
            start = 0
            for count in engine.accepted_per_window:
                windows += 1
                accepted[: min(count, one.tokens - start)] += 1
                start += count + 1
        predicted = sum((tally(Weights(v[:, None]), 3).accepted_at[2, :3] for v in values), np.zeros(3))
        steps = sum(tally(Weights(v[:, None]), 3).windows[2] for v in values)
        runs = [[walks(v, 3, rng) for v in values] for _ in range(200)]
        spread = np.std([sum(w for w, _ in run) for run in runs])
        deep = np.std([np.sum([a for _, a in run], axis=0) for run in runs], axis=0)
        print(
            f"{domain}: {len(chosen)} requests, {tokens} tokens; "
            f"windows {windows}, replay {steps:.1f} +- {spread:.1f}; "
            f"accepted {accepted}, replay {predicted.round(1)} +- {deep.round(1)}"
        )
        assert abs(steps - windows) < 3 * spread
        assert (np.abs(predicted - accepted) < 3 * deep).all()


def test_greedy_requests_are_judged_by_argmax_under_either_rule(eagle3: Checkpoint, target: Target) -> None:
    samples = [tokens_of(record) for record in trace("eagle3.T0")[:10]]
    by_argmax = Eagle3Draft(eagle3, target, depths=3).replay(samples)
    by_rejection = Eagle3Draft(eagle3, target, depths=3, rule="rejection").replay(samples)
    for left, right in zip(by_argmax, by_rejection, strict=True):
        np.testing.assert_array_equal(left.values, right.values)


def test_eagle3_under_rejection_from_its_definition(eagle3: Checkpoint, target: Target) -> None:
    """min(1, q/p) from the two models' plain logits, at every start and depth of one request."""
    sample = tokens_of(trace("eagle3.T0.8")[3])
    draft = Eagle3Draft(eagle3, target, depths=4, rule="rejection")
    assert eagle3.to_target is not None
    seen: list[torch.Tensor] = []
    compute = draft.head.logits
    draft.head.logits = lambda out: seen.append(compute(out)) or seen[-1]  # type: ignore[method-assign,func-returns-value]
    found = draft.replay([sample])[0].values
    x = torch.tensor([*sample.prompt, *sample.output])
    with torch.inference_mode():
        logits = target.model().model(x[None]).logits[0] / 0.8
    p = logits.softmax(-1)
    order = p.sort(-1, descending=True)
    kept = order.values.cumsum(-1) - order.values < 0.95
    mass = (order.values * kept).sum(-1)
    places = {int(token): i for i, token in enumerate(eagle3.to_target)}
    compared = 0
    for depth, z in enumerate(seen):
        q = (z / 0.8).softmax(-1)
        for row in range(len(z)):
            at = len(sample.prompt) + 1 + row + depth
            token = int(x[at])
            expected = 0.0
            if token in places:
                expected = min(1.0, float(q[row, places[token]] / (p[at - 1, token] / mass[at - 1])))
            assert found[row, depth] == pytest.approx(expected, abs=2e-4)
            compared += 1
    print(f"{compared} weights compared")
    assert compared == sum(sample.judged - depth for depth in range(4))


def test_agreement_of_a_chain_from_its_definition(target: Target) -> None:
    sample = tokens_of(trace("draft3.T0.8")[0])
    chain = ChainDraft.load(DATA / "models" / "chain", device=CPU, dtype=torch.float32, target=target, agreement=True)
    _, found = chain.measure([sample])[0]
    assert found is not None
    x = torch.tensor([[*sample.prompt, *sample.output]])
    models: Any = (target.model().model, chain._model.model)
    with torch.inference_mode():
        p, q = (model(x).logits[0, len(sample.prompt) : -1].softmax(-1) for model in models)
    served = x[0, len(sample.prompt) + 1 :]
    assert found.proposals.tolist() == [sample.judged]
    assert found.match[0] == float((p.argmax(-1) == q.argmax(-1)).sum())
    assert found.p_top1[0] == pytest.approx(float(p.gather(1, q.argmax(-1, keepdim=True)).sum()), rel=1e-4)
    assert found.overlap[0] == pytest.approx(float(torch.minimum(p, q).sum()), rel=1e-4)
    assert found.logprob == pytest.approx(float(p.gather(1, served[:, None]).log().sum()), rel=1e-4)
    assert found.entropy == pytest.approx(float(torch.special.entr(p).sum()), rel=1e-4)
    assert (found.tokens, found.outside) == (sample.judged, 0)
    assert (found + found).as_dict() == found.as_dict() | {"tokens": 2 * found.tokens}


def test_rejection_without_a_target_is_refused() -> None:
    with pytest.raises(Exception, match="the rejection rule needs the target's probabilities"):
        ChainDraft.load(DATA / "models" / "chain", device=CPU, dtype=torch.float32, rule="rejection")


def test_unknown_sampling_is_skipped(target: Target) -> None:
    chain = ChainDraft.load(DATA / "models" / "chain", device=CPU, dtype=torch.float32, target=target, rule="rejection")
    assert chain.skip_reason(Tokens([1], [2, 3])) == "sampling_unknown"
    assert chain.skip_reason(Tokens([1], [2, 3], temperature=0.0)) is None
