"""Chain drafts against a real engine's record, window by window, and against themselves in other batches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from driftwatch.acceptance import accepted_per_window, tally
from driftwatch.errors import ModelError
from driftwatch.shadow.chain import ChainDraft
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.replay import batches, replay

from .conftest import DATA, tokens_of, trace

CHAIN = DATA / "models" / "chain"
NEAR_TIE = 0.1
"""Gap of the draft's two best logits (float32) under which bfloat16 rounding in the engine may choose the other one."""


@pytest.fixture(scope="module")
def chain() -> ChainDraft:
    return ChainDraft.load(CHAIN, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def model() -> Any:
    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(CHAIN, dtype=torch.float32).eval()


def gaps(model: Any, tokens: Tokens) -> np.ndarray[Any, Any]:
    """Gap of the two best logits at each judged token, from a plain forward pass of the model."""
    ids = torch.tensor([[*tokens.prompt, *tokens.output[:-1]]])
    with torch.inference_mode():
        best = model(ids).logits[0, len(tokens.prompt) :].topk(2).values
    found: np.ndarray[Any, Any] = (best[:, 0] - best[:, 1]).numpy()
    return found


@pytest.mark.parametrize(
    ("name", "gamma", "steps"),
    [("draft3.T0", 3, 1932), ("draft3.T0.8", 3, 3156), ("draft5.T0", 5, 1738), ("draft5.T0.8", 5, 3089)],
)
def test_every_window_of_a_real_engine_but_for_near_ties(
    chain: ChainDraft, model: Any, name: str, gamma: int, steps: int
) -> None:
    """Each window is judged at the engine's own boundary; each request's last one may run past the output."""
    compared = windows = engine_windows = 0
    disagreements = []
    records = trace(name)
    results = {
        result.index: result.weights for result in replay(chain, [tokens_of(r) for r in records], batch_tokens=16_384)
    }
    for index, record in enumerate(records):
        weights = results[index]
        assert weights is not None
        assert record.engine is not None
        assert record.engine.accepted_per_window is not None
        windows += len(accepted_per_window(weights, gamma))
        engine_windows += len(record.engine.accepted_per_window)
        grid = np.concatenate([weights.by_start(gamma) == 1.0, np.zeros((weights.tokens, 1), bool)], axis=1)
        start = 0
        for accepted in record.engine.accepted_per_window[:-1]:
            compared += 1
            ours = int(grid[start].argmin())
            if ours != accepted:
                gap = gaps(model, tokens_of(record))[start + min(ours, accepted)]
                disagreements.append((record.id, start, ours, accepted, round(float(gap), 4)))
            start += accepted + 1
    assert compared == steps
    print(f"{name}: {compared} windows compared, near-ties: {disagreements}")
    assert [one for one in disagreements if one[-1] >= NEAR_TIE] == []
    assert windows == pytest.approx(engine_windows, rel=0.005)


def test_a_sample_is_judged_the_same_alone_and_in_any_batch(chain: ChainDraft) -> None:
    records = trace("draft3.T0")
    samples = [tokens_of(record) for record in records]
    samples = [Tokens(one.prompt, one.output[: 2 + 7 * (i % 9)]) for i, one in enumerate(samples)]
    alone = [chain.replay([one])[0].values for one in samples]
    for batch_tokens in (256, 1024, 100_000):
        results = list(replay(chain, samples, batch_tokens=batch_tokens))
        assert sorted(result.index for result in results) == list(range(len(samples)))
        different = 0
        for result in results:
            assert result.weights is not None
            different += int((result.weights.values != alone[result.index]).sum())
        assert different == 0


def test_weights_are_the_plain_models_first_choices(chain: ChainDraft, model: Any) -> None:
    sample = tokens_of(trace("draft3.T0.8")[0])
    with torch.inference_mode():
        logits = model(torch.tensor([[*sample.prompt, *sample.output]])).logits[0]
    first = logits[len(sample.prompt) : -1].argmax(dim=-1)
    expected = (first == torch.tensor(sample.output[1:])).numpy().astype(float)
    np.testing.assert_array_equal(chain.replay([sample])[0].values[:, 0], expected)


def test_samples_that_cannot_be_replayed_say_why(chain: ChainDraft) -> None:
    samples = [Tokens([1], [2]), Tokens([1], [2, 5000]), Tokens([5000], [2, 3]), Tokens([1], [2, 3])]
    reasons = {result.index: result.skipped for result in replay(chain, samples, batch_tokens=1024)}
    assert reasons == {0: "too_short", 1: "outside_vocabulary", 2: "outside_vocabulary", 3: None}


def cut(folder: Path, kept: list[int]) -> Path:
    """The chain draft with only some of its vocabulary, in the cut form."""
    shutil.copytree(CHAIN, folder)
    tensors = load_file(folder / "model.safetensors")
    ids = torch.tensor(kept)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][ids].contiguous()
    tensors["d2t"] = ids - torch.arange(len(kept))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder, vocab_size=len(kept), driftwatch_unk_id=0)
    (folder / "tokenizer.json").unlink()
    return folder


def edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.chmod(0o644)
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_cut_vocabulary_judges_as_the_whole_one_where_it_reaches(chain: ChainDraft, tmp_path: Path) -> None:
    """With every token that occurs kept, only proposals outside the cut can change, and those never hit."""
    records = trace("draft3.T0")[:20]
    samples = [tokens_of(record) for record in records]
    kept = sorted({0} | {token for one in samples for token in (*one.prompt, *one.output)})
    draft = ChainDraft.load(cut(tmp_path / "cut", kept), device=torch.device("cpu"), dtype=torch.float32)
    assert draft.mapped
    for whole, part in zip(chain.replay(samples), draft.replay(samples), strict=True):
        assert (part.values >= whole.values).all()
    assert sum(tally(w, 3).accepted[2] for w in draft.replay(samples)) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d2t: d2t - 5, "d2t does not lead from its 1024 ids"),
        (lambda d2t: d2t + 2**40, "d2t does not lead from its 1024 ids"),
        (lambda d2t: -torch.arange(len(d2t)), "d2t does not lead from its 1024 ids"),
        (lambda d2t: d2t[:-1], r"d2t has shape \[1023\] for a vocabulary of 1024"),
        (-1, "driftwatch_unk_id is -1, not a number from 0 on"),
        ("x", "driftwatch_unk_id is 'x', not a number from 0 on"),
        (1024, "driftwatch_unk_id is 1024, none of its 1024 ids"),
    ],
)
def test_a_map_that_leads_nowhere_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    tensors = load_file(CHAIN / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:1024].clone()
    tensors["d2t"] = torch.zeros(1024, dtype=torch.long)
    config = json.loads((CHAIN / "config.json").read_text()) | {"vocab_size": 1024}
    if callable(change):
        tensors["d2t"] = change(tensors["d2t"])
    else:
        config["driftwatch_unk_id"] = change
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        ChainDraft.load(tmp_path, device=torch.device("cpu"), dtype=torch.float32)


def test_a_learnt_table_of_positions_is_never_left(tmp_path: Path) -> None:
    """A computed position knows no end; behind the last row of a table there is nothing to read."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    draft = ChainDraft.load(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    samples = [Tokens([1] * 10, list(range(count))) for count in (7, 8)]
    assert [draft.skip_reason(sample) for sample in samples] == [None, "too_long"]
    fits, over = sorted(replay(draft, samples, batch_tokens=64), key=lambda one: one.index)
    assert fits.weights is not None
    assert (over.weights, over.skipped) == (None, "too_long")


def test_a_token_outside_a_cut_vocabulary_is_never_hit(tmp_path: Path) -> None:
    sample = tokens_of(trace("draft3.T0")[0])
    kept = sorted({0, *sample.prompt, *sample.output} - {sample.output[-1]})
    draft = ChainDraft.load(cut(tmp_path / "cut", kept), device=torch.device("cpu"), dtype=torch.float32)
    missed = [i for i, token in enumerate(sample.output[1:]) if token == sample.output[-1]]
    assert missed
    assert draft.skip_reason(sample) is None
    assert not draft.replay([sample])[0].values[missed].any()


def damaged(folder: Path, how: str) -> Path:
    if how == "folder":
        return folder
    shutil.copytree(CHAIN, folder)
    weights = folder / "model.safetensors"
    for path in folder.iterdir():
        path.chmod(0o644)
    if how == "config":
        (folder / "config.json").unlink()
    elif how == "json":
        (folder / "config.json").write_text("{")
    elif how == "kind":
        edit(folder, model_type="nonsense")
    elif how == "weights":
        weights.unlink()
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif how == "shape":
        edit(folder, intermediate_size=64)
    elif how == "heads":
        edit(folder, hidden_size=64)
    else:
        tensors = load_file(weights)
        if how == "missing":
            del tensors["model.norm.weight"]
        else:
            tensors["fc.weight"] = torch.zeros(2, 2)
        save_file(tensors, weights, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("folder", "no such folder"),
        ("config", "config.json: No such file"),
        ("json", "config.json is not JSON"),
        ("kind", "nonsense"),
        ("weights", "no .safetensors or .bin weights"),
        ("truncated", "draft"),
        ("shape", "does not have the shape config.json says"),
        ("heads", "hidden size .64. is not a multiple"),
        ("missing", "1 tensors are missing, the first is model.norm.weight"),
        ("extra", "1 tensors belong to no part of it, the first is fc.weight"),
    ],
)
def test_an_unreadable_draft_is_one_line(tmp_path: Path, how: str, message: str) -> None:
    folder = damaged(tmp_path / "draft", how)
    with pytest.raises(ModelError, match=message) as caught:
        ChainDraft.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_batches_keep_the_budget_and_pad_little() -> None:
    rng = np.random.default_rng(1)
    lengths = np.clip(np.exp(rng.normal(6, 1, 400)), 8, 8192).astype(int).tolist()
    grouped = list(batches(range(400), lengths, 8192))
    assert sorted(i for batch in grouped for i in batch) == list(range(400))
    padded = [max(lengths[i] for i in batch) * len(batch) for batch in grouped]
    assert max(padded) <= 8192
    assert 1 - sum(lengths) / sum(padded) < 0.15


class Forgetful:
    """A draft whose device holds only so many samples at a time."""

    mapped = False

    def __init__(self, draft: ChainDraft, capacity: int) -> None:
        self.draft, self.capacity, self.fingerprint = draft, capacity, draft.fingerprint

    def skip_reason(self, tokens: Tokens) -> str | None:
        return self.draft.skip_reason(tokens)

    def replay(self, batch: Any) -> Any:
        if len(batch) > self.capacity:
            raise torch.OutOfMemoryError("out of memory")
        return self.draft.replay(batch)


def test_out_of_memory_halves_the_batch(chain: ChainDraft) -> None:
    samples = [tokens_of(record) for record in trace("draft3.T0")[:9]]
    whole = {result.index: result.weights for result in replay(chain, samples, batch_tokens=100_000)}
    for result in replay(Forgetful(chain, 2), samples, batch_tokens=100_000):
        expected = whole[result.index]
        assert result.weights is not None
        assert expected is not None
        np.testing.assert_array_equal(result.weights.values, expected.values)
    skipped = [result.skipped for result in replay(Forgetful(chain, 0), samples, batch_tokens=100_000)]
    assert skipped == ["out_of_memory"] * 9


def test_other_errors_are_not_taken_for_memory(chain: ChainDraft) -> None:
    class Broken(Forgetful):
        def replay(self, batch: Any) -> Any:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        list(replay(Broken(chain, 1), [Tokens([1], [2, 3])], batch_tokens=64))
