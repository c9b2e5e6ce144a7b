"""EAGLE-3 trees against explicit ones, node by node with a list of the keys that each sees, and against the chain."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from driftwatch.acceptance import Weights, accepted_per_window, tally
from driftwatch.cli import commands
from driftwatch.errors import ModelError
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.eagle3 import head, rollout
from driftwatch.shadow.eagle3.checkpoint import Checkpoint
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.eagle3.rollout import Eagle3TreeDraft
from driftwatch.shadow.eagle3.tree import Growth, Tree, split_spec
from driftwatch.shadow.replay import replay
from driftwatch.shadow.target import Target

from .conftest import CPU, DATA, tokens_of, trace
from .test_batches import Largest
from .test_eagle3_chain import VOCABULARY, fed, flags, random_head, random_spec, random_target

EAGLE3 = DATA / "models" / "eagle3"
TARGET = DATA / "models" / "target"
SGLANG = Tree(5, 4, 8)
"""What SGLang takes for Llama targets."""


@dataclass
class Node:
    token: int
    score: np.float32
    parent: Node | None
    hidden: torch.Tensor
    """What the head is fed with it: what came out of its parent."""


def grown(
    checkpoint: Checkpoint, target: Target, known: Sequence[int], tree: Tree, *, ancestors: bool = False
) -> list[Node]:
    """The tree after the tokens known so far, plainly: the engine's beam positions own the keys they wrote, or with
    ``ancestors`` each node sees its own ancestors' keys, as the paper has it."""
    spec = checkpoint.spec
    assert checkpoint.to_target is not None
    chain, logits, hidden = fed(checkpoint, target, known)
    context = list(zip(chain.keys, chain.values, strict=True))

    def children(logits: torch.Tensor, hidden: torch.Tensor, parent: Node | None) -> list[Node]:
        p = logits.detach().float().softmax(0).numpy()
        best = sorted(range(len(p)), key=lambda i: -p[i])[: tree.topk]
        score = np.float32(1.0) if parent is None else parent.score
        return [Node(int(checkpoint.to_target[i]), score * p[i], parent, hidden) for i in best]  # type: ignore[index]

    level = children(logits, hidden, None)
    nodes = list(level)
    written: list[list[Any]] = [[] for _ in range(tree.topk)]
    wrote: dict[int, Any] = {}
    for step in range(1, tree.steps):
        beam = sorted(level, key=lambda node: -node.score)[: tree.topk]
        level = []
        for slot, node in enumerate(beam):
            seen, above = written[slot], node.parent
            if ancestors:
                seen = []
                while above is not None:
                    seen, above = [wrote[id(above)], *seen], above.parent
            visible = [*context, *seen]
            chain.keys, chain.values = [key for key, _ in visible], [value for _, value in visible]
            logits, hidden = chain.step(node.token, node.hidden, len(known) - 2 + step + spec.first_position)
            wrote[id(node)] = chain.keys[-1], chain.values[-1]
            written[slot].append(wrote[id(node)])
            level += children(logits, hidden, node)
        nodes += level
    return sorted(nodes, key=lambda node: -node.score)[: tree.tokens - 1]


def path_of(node: Node | None) -> list[int]:
    return [] if node is None else [*path_of(node.parent), node.token]


def longest(nodes: Sequence[Node], served: Sequence[int]) -> int:
    """The longest prefix of the served tokens that is a path from the root."""
    at, accepted = None, 0
    for token in served:
        below = [node for node in nodes if node.parent is at and node.token == token]
        if not below:
            break
        (at,) = below
        accepted += 1
    return accepted


def engine_walk(checkpoint: Checkpoint, target: Target, sample: Tokens, tree: Tree, **how: bool) -> list[int]:
    x, counts, known = [*sample.prompt, *sample.output], [], len(sample.prompt) + 1
    while known < len(x):
        counts.append(longest(grown(checkpoint, target, x[:known], tree, **how), x[known:]))
        known += counts[-1] + 1
    return counts


def likely_output(checkpoint: Checkpoint, target: Target, seed: int, prompt: int, outputs: int, tree: Tree) -> Tokens:
    """An output that follows some path of each window's tree, so that deep and unlikely nodes are served."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, VOCABULARY, prompt + 1).tolist()
    while len(x) < prompt + outputs:
        nodes = grown(checkpoint, target, x, tree)
        x += [*path_of(nodes[int(rng.integers(len(nodes)))]), int(rng.integers(0, VOCABULARY))]
    return Tokens(x[:prompt], x[prompt : prompt + outputs])


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    steps, topk = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    most = topk + (steps - 1) * topk**2 + 1
    return Tree(steps, topk, most if topk == 1 else draw(st.integers(2, min(most, 20))))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    tree=trees(),
    flags=flags,
    position=st.integers(0, 1),
    prompt=st.integers(1, 6),
    outputs=st.integers(2, 14),
    stride=st.integers(1, 9),
)
def test_windows_of_an_explicit_tree(
    seed: int, tree: Tree, flags: dict[str, bool], position: int, prompt: int, outputs: int, stride: int
) -> None:
    target = random_target(seed)
    checkpoint = random_head(seed, random_spec(**flags, first_position=position))
    sample = likely_output(checkpoint, target, seed, prompt, outputs, tree)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "STRIDE", stride)
        weights = Eagle3TreeDraft(checkpoint, target, tree).replay([sample])[0]
    assert accepted_per_window(weights, tree.steps) == engine_walk(checkpoint, target, sample, tree)


def test_the_compared_trees_are_deep_enough() -> None:
    """The same over fixed seeds, with the windows by what they accept."""
    counts = []
    for seed in range(8):
        target, checkpoint = random_target(seed), random_head(seed, random_spec())
        sample = likely_output(checkpoint, target, seed, 3, 30, SGLANG)
        walked = engine_walk(checkpoint, target, sample, SGLANG)
        (weights,) = Eagle3TreeDraft(checkpoint, target, SGLANG).replay([sample])
        assert accepted_per_window(weights, SGLANG.steps) == walked
        counts += walked
    reached = np.bincount(counts, minlength=SGLANG.steps + 1)
    print(f"{len(counts)} windows compared, by accepted proposals: {reached}")
    assert (reached > 0).all()


def test_keys_belong_to_beam_positions_as_the_engines_do() -> None:
    """Nodes that are in a tree only because a beam position sees what it wrote itself, and not its ancestors' keys."""
    told_apart, tree = 0, Tree(5, 4, 20)
    for seed in range(6):
        target, checkpoint = random_target(seed), random_head(seed, random_spec())
        louder = {"self_attn.v_proj.weight": 10 * checkpoint.tensors["self_attn.v_proj.weight"]}
        checkpoint = dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, **louder})
        known = np.random.default_rng(seed).integers(0, VOCABULARY, 4).tolist()
        nodes = grown(checkpoint, target, known, tree)
        others = grown(checkpoint, target, known, tree, ancestors=True)
        draft = Eagle3TreeDraft(checkpoint, target, tree)
        for path in map(path_of, nodes):
            if longest(others, path) < len(path):
                (weights,) = draft.replay([Tokens(known[:-1], [known[-1], *path])])
                assert accepted_per_window(weights, tree.steps) == [len(path)]
                told_apart += 1
    print(f"{told_apart} nodes told apart")
    assert told_apart >= 5


@pytest.mark.parametrize("name", ["eagle3.T0", "eagle3.T0.8"])
def test_topk_1_is_the_chain_on_real_traffic(name: str, eagle3: Checkpoint, target: Target) -> None:
    records = trace(name)
    samples = [tokens_of(record) for record in records]
    for steps in (3, 5):
        chain = Eagle3Draft(eagle3, target, depths=steps)
        tree = Eagle3TreeDraft(eagle3, target, Tree(steps, 1, steps + 1))
        expected = {result.index: result.weights for result in replay(chain, samples, batch_tokens=8192)}
        found = {result.index: result.weights for result in replay(tree, samples, batch_tokens=8192)}
        windows = engine_windows = 0
        for i, record in enumerate(records):
            one, other = found[i], expected[i]
            assert one is not None
            assert other is not None
            walked = accepted_per_window(one, steps)
            assert walked == accepted_per_window(other, steps)
            assert tally(one, steps).figures(steps) == tally(other, steps).figures(steps)
            assert record.engine is not None
            assert record.engine.accepted_per_window is not None
            windows, engine_windows = windows + len(walked), engine_windows + len(record.engine.accepted_per_window)
        if steps == 3:
            print(f"{name}: {windows} windows, the engine's {engine_windows}")
            assert windows == pytest.approx(engine_windows, rel=0.005)


def test_more_tokens_never_accept_less_at_the_same_start(eagle3: Checkpoint, target: Target) -> None:
    """Of one roll-out the larger tree holds the smaller: compared at each start that some walk visits."""
    samples = [tokens_of(record) for record in trace("eagle3.T0")[:24]]
    before: list[Weights] = []
    compared = more = 0
    for tokens in (2, 4, 8, 16, 32, 69):
        found = Eagle3TreeDraft(eagle3, target, Tree(5, 4, tokens)).replay(samples)
        for one, other in zip(before, found, strict=bool(before)):
            smaller, larger = one.by_start(5), other.by_start(5)
            both = ~np.isnan(smaller[:, 0]) & ~np.isnan(larger[:, 0])
            gain = np.nansum(larger[both], axis=1) - np.nansum(smaller[both], axis=1)
            assert (gain >= 0).all()
            compared, more = compared + len(gain), more + int((gain > 0).sum())
        before = found
    print(f"{compared} starts compared, {more} accept more in the larger tree")
    assert more > 0


def test_a_tree_accepts_more_than_the_chain_and_holds_it(eagle3: Checkpoint, target: Target) -> None:
    samples = [tokens_of(record) for record in trace("eagle3.T0")]
    chain = [tally(one, 5).figures(5) for one in Eagle3Draft(eagle3, target, depths=5).replay(samples)]
    tree = [tally(one, 5).figures(5) for one in Eagle3TreeDraft(eagle3, target, SGLANG).replay(samples)]
    lengths = [1 + sum(one["accepted"] for one in all_) / sum(one["windows"] for one in all_) for all_ in (chain, tree)]
    print(f"acceptance length: chain of 5 {lengths[0]:.3f}, tree {SGLANG} {lengths[1]:.3f}")
    assert lengths[1] > lengths[0]
    assert all(one["drafted"] == 5 * one["windows"] for one in tree)


@pytest.fixture(scope="module")
def uneven() -> list[Tokens]:
    """Requests of very different lengths, some with one judged token."""
    found = [tokens_of(record) for record in trace("eagle3.T0.8")[::3]]
    return [dataclasses.replace(one, output=one.output[: 2 + 9 * (i % 8)]) for i, one in enumerate(found)]


def test_companions_and_padding(eagle3: Checkpoint, target: Target, uneven: list[Tokens]) -> None:
    draft = Eagle3TreeDraft(eagle3, target, SGLANG)
    alone = [draft.replay([one])[0] for one in uneven]
    for batch_tokens in (200, 1000, 100_000):
        for result in replay(draft, uneven, batch_tokens=batch_tokens):
            assert result.weights is not None
            np.testing.assert_array_equal(result.weights.values, alone[result.index].values)


def test_pieces_of_a_long_sample(
    eagle3: Checkpoint, target: Target, uneven: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, rows, scores and starts in pieces, and walks from elsewhere: the same windows."""
    draft = Eagle3TreeDraft(eagle3, target, SGLANG)
    expected = draft.replay(uneven[:8])
    monkeypatch.setattr(target.model(), "prefill_tokens", 13)
    monkeypatch.setattr("driftwatch.shadow.judge.LOGIT_ELEMENTS", 1024 * 4 * 17)
    monkeypatch.setattr(head, "SCORE_ELEMENTS", 4 * 300)
    monkeypatch.setattr(rollout, "STRIDE", 7)
    for one, other in zip(draft.replay(uneven[:8]), expected, strict=True):
        np.testing.assert_array_equal(one.values, other.values)


def test_no_tensor_of_positions_by_nodes_by_vocabulary(eagle3: Checkpoint) -> None:
    """Of 2,000 judged tokens the largest tensor is a piece of the prefill's mask, as it is of the chain."""
    target = Target(DATA / "models" / "target", device=CPU, dtype=torch.float32, prefill_tokens=512)
    draft = Eagle3TreeDraft(eagle3, target, SGLANG)
    rng = np.random.default_rng(0)
    sample = Tokens(rng.integers(0, 2048, 2000).tolist(), rng.integers(0, 2048, 2001).tolist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("driftwatch.shadow.judge.LOGIT_ELEMENTS", 1 << 18)
        patch.setattr(head, "SCORE_ELEMENTS", 1 << 19)
        with Largest() as largest:  # type: ignore[no-untyped-call]
            draft.replay([sample])
    print(f"largest tensor: {largest.elements:,} elements {largest.shape}")
    assert largest.elements <= 512 * 4000


def test_what_it_costs_is_counted(eagle3: Checkpoint, target: Target) -> None:
    """Every visited start is rolled out once; a tree takes at most one row and ``topk`` for each further step."""
    samples = [tokens_of(record) for record in trace("eagle3.T0")[:12]]
    draft = Eagle3TreeDraft(eagle3, target, SGLANG)
    windows = sum(len(accepted_per_window(one, 5)) for one in draft.replay(samples))
    cost = draft.cost
    print(f"{windows} windows: {cost.trees} trees, {cost.passes} passes, {cost.rows} rows")
    assert cost.trees >= windows
    assert cost.trees <= cost.rows <= cost.trees * (1 + 4 * 4)


def test_agreement_is_that_of_the_chain(eagle3: Checkpoint, target: Target) -> None:
    samples = [tokens_of(record) for record in trace("eagle3.T0")[:4]]
    chain = Eagle3Draft(eagle3, target, depths=5, agreement=True).measure(samples)
    tree = Eagle3TreeDraft(eagle3, target, SGLANG, agreement=True).measure(samples)
    for (weights, found), (_, expected) in zip(tree, chain, strict=True):
        assert weights.walked
        assert found is not None
        assert expected is not None
        assert found.as_dict() == expected.as_dict()


@settings(deadline=None)
@given(st.data(), trees())
def test_a_settled_tree_stays_as_it_is(data: st.DataObject, tree: Tree) -> None:
    """Levels grown after it was called settled change nothing, whatever their probabilities."""
    assume(tree.steps > 1)
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    served = torch.from_numpy(rng.integers(0, 5, (8, tree.steps)))
    growth = Growth(tree, 8, CPU)
    settled = torch.zeros(8, dtype=torch.bool)
    frozen = torch.zeros(8, dtype=torch.long)
    for depth in range(tree.steps):
        beam = 1 if depth == 0 else tree.topk
        p = -np.sort(-rng.dirichlet(np.full(6, 0.3), (8, beam)).astype(np.float32), axis=-1)[..., : tree.topk]
        tokens = np.argsort(rng.random((8, beam, 6)), axis=-1)[..., : tree.topk]
        growth.grow(torch.from_numpy(p), torch.from_numpy(tokens), served[:, depth])
        now = growth.accepted()
        assert torch.equal(now[settled], frozen[settled])
        settled, frozen = settled | growth.settled(), now


def test_the_name_of_a_tree(tmp_path: Path) -> None:
    assert split_spec("a/b") == ("a/b", None)
    assert split_spec("C:/a/b") == ("C:/a/b", None)
    head = str(tmp_path)
    assert split_spec(f"{head}:steps=5,topk=4,tokens=8") == (head, SGLANG)
    assert split_spec(f"{head}:{SGLANG}") == (head, SGLANG)
    with pytest.raises(ModelError, match="no such folder"):
        split_spec(f"{head}/b:{SGLANG}")
    odd = tmp_path / "x:steps=1"
    odd.mkdir()
    assert split_spec(odd) == (str(odd), None)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("steps=5,topk=4", "`tokens` is missing"),
        ("steps=5,topk=4,tokens=x", "`tokens` is 'x'"),
        ("steps=5,topk=4,tokens=8,depth=2", "`depth` is no parameter"),
        ("steps=2,topk=2,tokens=8", "2 to 7 tokens"),
        ("steps=3,topk=1,tokens=3", "tokens = steps \\+ 1 = 4"),
        ("steps=0,topk=1,tokens=3", "`steps` is '0'"),
    ],
)
def test_a_name_of_no_tree(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        split_spec(f"{tmp_path}:{body}")
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_trees_are_verified_by_the_argmax_rule_alone(eagle3: Checkpoint, target: Target) -> None:
    with pytest.raises(ModelError, match="argmax rule alone"):
        Eagle3TreeDraft(eagle3, target, SGLANG, rule="rejection")
    with pytest.raises(ModelError, match="more than its 12 token ids"):
        Eagle3TreeDraft(random_head(0, random_spec()), random_target(0), Tree(2, 13, 20))


def test_another_tree_is_another_draft(eagle3: Checkpoint, target: Target) -> None:
    one, other = (Eagle3TreeDraft(eagle3, target, Tree(5, 4, tokens)).fingerprint for tokens in (8, 9))
    assert one.sha256 != other.sha256 != eagle3.sha256
    assert one.path.endswith(":steps=5,topk=4,tokens=8")


def test_replay_on_the_command_line(tmp_path: Path) -> None:
    """Figures of its own gamma alone, whatever --gamma says, in the report and in each line."""
    lines = tmp_path / "lines.jsonl"
    name = f"{EAGLE3}:{SGLANG}"
    options = ["--draft", name, "--target", str(TARGET), "--gamma", "3", "--by", "domain", "--per-request", str(lines)]
    ran = CliRunner().invoke(commands, ["replay", str(DATA / "traces" / "eagle3.T0.jsonl"), *options, "--json"])
    assert ran.exit_code == 0, ran.output
    report = json.loads(ran.stdout)
    assert list(report["gamma"]) == ["5"]
    assert all(list(found["gamma"]) == ["5"] for found in report["by"]["domain"].values())
    assert report["draft"]["path"] == name
    assert report["cost"]["trees"] >= report["gamma"]["5"]["windows"]
    assert report["agreement"]["tokens"] == 72 * 63
    counted = [json.loads(line)["gamma"] for line in lines.read_text().splitlines()]
    assert [list(one) for one in counted] == [["5"]] * 72
    assert sum(len(one["5"]["accepted_per_window"]) for one in counted) == report["gamma"]["5"]["windows"]


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (f"{DATA / 'models' / 'chain'}:{SGLANG}", "this is a chain draft"),
        (f"{EAGLE3}:steps=5,topk=4", "`tokens` is missing"),
        (f"{EAGLE3}x:{SGLANG}", "no such folder"),
    ],
)
def test_a_wrong_tree_is_one_line(draft: str, words: str) -> None:
    trace_path = str(DATA / "traces" / "eagle3.T0.jsonl")
    ran = CliRunner().invoke(commands, ["replay", trace_path, "--draft", draft, "--target", str(TARGET)])
    assert isinstance(ran.exception, ModelError)
    assert words in str(ran.exception)
    assert "\n" not in str(ran.exception)


def test_doctor_tries_the_head_of_a_tree() -> None:
    ran = CliRunner().invoke(commands, ["doctor", "--draft", f"{EAGLE3}:{SGLANG}", "--target", str(TARGET)])
    assert ran.exit_code == 0, ran.output
    assert "of its first proposals accepted on" in ran.output
    assert "reads hidden_states [2, 4, 5]" in ran.output
