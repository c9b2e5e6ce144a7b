"""Hidden states from an engine: the replay is the one on the model at hand, and every fault of the engine is named."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from driftwatch.cli.doctor import doctor
from driftwatch.cli.replay import replay as command
from driftwatch.errors import DriftwatchError, ModelError
from driftwatch.records import Record
from driftwatch.settings import HiddenStates, Settings
from driftwatch.shadow.causal import Causal
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.eagle3.checkpoint import Checkpoint, read_checkpoint
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.packing import pack
from driftwatch.shadow.replay import replay
from driftwatch.shadow.states import engine as asking
from driftwatch.shadow.states import vllm
from driftwatch.shadow.target import NoTargetError, Target
from driftwatch.shadow.worker import Worker
from driftwatch.store import samples, work
from driftwatch.store.connection import Store
from driftwatch.store.schema import Work

from .conftest import CPU, DATA, tokens_of, trace
from .state_engines import SmallSglang, SmallVllm
from .test_eagle3_loader import stored, written

EAGLE3, TARGET = DATA / "models" / "eagle3", DATA / "models" / "target"
LAYERS = (2, 4, 5)
NOBODY = "http://127.0.0.1:9"
"""The discard port: nothing listens."""


@pytest.fixture
def sglang(target: Target) -> SmallSglang:
    return SmallSglang(target, LAYERS)


@pytest.fixture
def vllm_engine(target: Target, tmp_path: Path) -> SmallVllm:
    folder = tmp_path / "shared"
    folder.mkdir()
    return SmallVllm(target, LAYERS, folder)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The target's folder as a large target's would be used: no weights but the two tables."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((TARGET / name).read_bytes())
    whole = load_file(TARGET / "model.safetensors")
    save_file({"model.embed_tokens.weight": whole["model.embed_tokens.weight"]}, folder / "model-1.safetensors")
    save_file({"lm_head.weight": whole["lm_head.weight"]}, folder / "model-2.safetensors")
    return folder


def served(url: str, folder: Path, shared: Path | None = None, layers: Sequence[int] = LAYERS) -> Target:
    engine = HiddenStates(url=url, layers=list(layers), folder=shared)
    return Target(folder, device=CPU, dtype=torch.float32, engine=engine)


def some() -> list[Tokens]:
    return [tokens_of(record) for record in trace("eagle3.T0")[::4]]


def same(draft: Eagle3Draft, local: Eagle3Draft, found: Sequence[Tokens]) -> int:
    """Weights of both, by replay in batches; the number compared."""
    mine = {one.index: one.weights for one in replay(draft, found, batch_tokens=1000)}
    theirs = {one.index: one.weights for one in replay(local, found, batch_tokens=1000)}
    compared = 0
    for i in range(len(found)):
        a, b = mine[i], theirs[i]
        assert a is not None
        assert b is not None
        np.testing.assert_array_equal(a.values, b.values)
        compared += a.values.size
    return compared


@pytest.mark.parametrize("chunk", [17, 10_000])
def test_replay_on_sglang(eagle3: Checkpoint, target: Target, sglang: SmallSglang, bare: Path, chunk: int) -> None:
    sglang.chunk = chunk
    with sglang.running() as url:
        draft = Eagle3Draft(eagle3, served(url, bare), depths=5)
        compared = same(draft, Eagle3Draft(eagle3, target, depths=5), some())
    print(f"{compared} weights through /generate equal the local ones")
    assert compared == 18 * 63 * 5
    assert len({body["extra_key"] for body in sglang.asked}) == len(sglang.asked) == 18
    assert all(body["log_metrics"] is False for body in sglang.asked)


def test_replay_on_vllm(
    eagle3: Checkpoint, target: Target, vllm_engine: SmallVllm, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are read in pieces, whole though they are finished after the answer, and gone afterwards."""
    monkeypatch.setattr(vllm, "PIECE", 23)

    def slowly(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        path.write_bytes(b"half")
        time.sleep(0.05)
        save_file(tensors, path)

    vllm_engine.write = slowly
    with vllm_engine.running() as url:
        draft = Eagle3Draft(eagle3, served(url, bare, vllm_engine.folder), depths=5)
        compared = same(draft, Eagle3Draft(eagle3, target, depths=5), some())
    print(f"{compared} weights through files equal the local ones")
    assert compared == 18 * 63 * 5
    assert list(vllm_engine.folder.iterdir()) == []


def test_a_head_takes_both_tables_from_the_targets_folder(
    target: Target, sglang: SmallSglang, bare: Path, tmp_path: Path
) -> None:
    config, tensors = stored()
    del tensors["lm_head.weight"]
    checkpoint = read_checkpoint(written(tmp_path / "head", config, tensors))
    assert (checkpoint.spec.head, checkpoint.spec.embedding) == ("target", "target")
    with sglang.running() as url:
        draft = Eagle3Draft(checkpoint, served(url, bare), depths=3)
        assert same(draft, Eagle3Draft(checkpoint, target, depths=3), some()[:4]) == 4 * 63 * 3


def test_layers_in_another_order_and_more_than_are_read(
    eagle3: Checkpoint, target: Target, sglang: SmallSglang, bare: Path
) -> None:
    sglang.layers = (5, 7, 2, 4)
    with sglang.running() as url:
        draft = Eagle3Draft(eagle3, served(url, bare, layers=sglang.layers), depths=3)
        assert same(draft, Eagle3Draft(eagle3, target, depths=3), some()[:4]) == 4 * 63 * 3


def test_the_model_and_the_engine_read_alike(target: Target, sglang: SmallSglang, bare: Path) -> None:
    """Both sides of the interface on one padded batch, at every position that is not padding."""
    model = target.model()
    packed = pack([replace(one, output=one.output[: 9 + 20 * i]) for i, one in enumerate(some()[:3])])
    assert packed.lengths == [int(count) for count in (packed.ids != 0).sum(dim=1)]

    def joined(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts, dim=-1)

    with sglang.running() as url, torch.inference_mode():
        states = served(url, bare).states()
        theirs = states.read(packed, (4, 2), joined, final=False)
        ours = model.read(packed, (4, 2), joined, final=True)
    assert isinstance(model, Causal)
    assert (theirs.final, states.hidden, states.layers) == (None, model.hidden, model.layers)
    assert (states.token_ids, states.dtype) == (model.token_ids, model.dtype)
    assert ours.final is not None
    assert ours.final.shape == (len(packed.served), model.hidden)
    for b, length in enumerate(packed.lengths):
        torch.testing.assert_close(theirs.states[b, :length], ours.states[b, :length], atol=2e-5, rtol=2e-5)
    assert torch.equal(states.embedding, model.embedding)
    assert torch.equal(states.head_weight, model.head_weight)


def test_other_layers_than_the_head_reads_are_named(eagle3: Checkpoint, bare: Path) -> None:
    with pytest.raises(ModelError, match=r"reads hidden_states \[2, 4, 5\], the engine gives \[1, 3, 4\]"):
        Eagle3Draft(eagle3, served(NOBODY, bare, layers=(1, 3, 4)), depths=3)
    with pytest.raises(ModelError, match=r"has 8 layers, hidden_states.layers says \[2, 4, 9\]"):
        Eagle3Draft(eagle3, served(NOBODY, bare, layers=(2, 4, 9)), depths=3)


def test_what_needs_probabilities_is_refused(eagle3: Checkpoint, bare: Path) -> None:
    refused: list[dict[str, Any]] = [{"agreement": True}, {"rule": "rejection"}]
    for options in refused:
        with pytest.raises(NoTargetError, match="gives its hidden states alone"):
            Eagle3Draft(eagle3, served(NOBODY, bare), depths=3, **options)


def test_a_folder_without_the_table_that_is_needed(eagle3: Checkpoint, bare: Path) -> None:
    (bare / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"one embed_tokens.weight is needed, found: no tensor of this name"):
        Eagle3Draft(eagle3, served(NOBODY, bare), depths=3)
    save_file({"model.embed_tokens.weight": torch.zeros(4, 4, dtype=torch.int8)}, bare / "model-1.safetensors")
    with pytest.raises(ModelError, match="is quantised"):
        Eagle3Draft(eagle3, served(NOBODY, bare), depths=3)
    (bare / "config.json").unlink()
    with pytest.raises(ModelError, match="target .*bare"):
        served(NOBODY, bare).states()


def faults(engine: SmallSglang) -> Iterator[tuple[str, str]]:
    """Faults of an SGLang, each with what is said of it."""
    engine.layers = (2, 4)
    yield "too few layers", r"gives 256 values a token, 3 layers .* of 128 are 384; start it with those layers"
    engine.layers, engine.cached = LAYERS, 20
    yield "rows in the prefix cache", r"hidden states of \d+ of \d+ tokens; switch its prefix cache"
    engine.cached = 0
    engine.answer = lambda path, body: (200, b'{"text": "", "meta_info": {}}')  # type: ignore[method-assign]
    yield "flag not set", "gives no meta_info.hidden_states; start it with --enable-return-hidden-states"
    engine.answer = lambda path, body: (200, b"<html>")  # type: ignore[method-assign]
    yield "no JSON", "gives no meta_info.hidden_states"
    engine.answer = lambda path, body: (404, b"{}")  # type: ignore[method-assign]
    yield "another engine", r"answers 404; a vLLM needs hidden_states.folder"
    engine.answer = lambda path, body: (503, b"{}")  # type: ignore[method-assign]
    yield "starting", "answers 503"


def test_faults_of_an_engine_are_one_line(eagle3: Checkpoint, sglang: SmallSglang, bare: Path) -> None:
    with sglang.running() as url:
        draft = Eagle3Draft(eagle3, served(url, bare), depths=3)
        for fault, message in faults(sglang):
            with pytest.raises(ModelError, match=message) as caught:
                list(replay(draft, some()[:2], batch_tokens=1000))
            assert "\n" not in str(caught.value), fault
    with pytest.raises(ModelError, match=r"is the engine running\? \(hidden_states.url\)"):
        list(replay(draft, some()[:2], batch_tokens=1000))


def test_faults_of_the_shared_folder(
    eagle3: Checkpoint, vllm_engine: SmallVllm, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "WRITING_S", 0.1)
    shared = vllm_engine.folder
    with vllm_engine.running() as url:
        elsewhere = Eagle3Draft(eagle3, served(url, bare, tmp_path), depths=3)
        with pytest.raises(ModelError, match=r"is .* its shared_storage_path\? \(hidden_states.folder\)"):
            elsewhere.replay(some()[:1])
        draft = Eagle3Draft(eagle3, served(url, bare, shared), depths=3)
        vllm_engine.write = lambda path, tensors: save_file(tensors | {"token_ids": tensors["token_ids"] + 1}, path)
        with pytest.raises(ModelError, match="are of other tokens than"):
            draft.replay(some()[:1])
        vllm_engine.write = lambda path, tensors: save_file({"x": tensors["token_ids"]}, path)
        with pytest.raises(ModelError, match="no hidden_states and token_ids in it"):
            draft.replay(some()[:1])
        assert all(file.name.startswith("cmpl-") for file in shared.iterdir())
        vllm_engine.answer = lambda path, body: (200, b'{"choices": []}')  # type: ignore[method-assign]
        with pytest.raises(ModelError, match="gives no kv_transfer_params.hidden_states_path"):
            draft.replay(some()[:1])


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_refused_sample_is_skipped_alone(
    eagle3: Checkpoint, sglang: SmallSglang, vllm_engine: SmallVllm, bare: Path, kind: str
) -> None:
    engine = sglang if kind == "sglang" else vllm_engine
    found = some()[:6]
    engine.longest = sorted(one.length for one in found)[3]
    refused = {i for i, one in enumerate(found) if one.length > engine.longest}
    assert 0 < len(refused) < 6
    with engine.running() as url:
        target = served(url, bare, vllm_engine.folder if kind == "vllm" else None)
        results = list(replay(Eagle3Draft(eagle3, target, depths=3), found, batch_tokens=10_000))
    assert {one.index for one in results if one.skipped == "no_hidden_states"} == refused
    assert sum(one.weights is not None for one in results) == 6 - len(refused)


def test_an_answer_too_large_is_a_refusal(
    eagle3: Checkpoint, sglang: SmallSglang, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "ANSWER_BYTES", 10_000)
    with sglang.running() as url:
        draft = Eagle3Draft(eagle3, served(url, bare), depths=3)
        (result,) = replay(draft, some()[:1], batch_tokens=1000)
    assert (result.weights, result.skipped) == (None, "no_hidden_states")


def model_entry(**more: Any) -> dict[str, Any]:
    drafts = [{"name": "incumbent", "path": str(EAGLE3)}, {"name": "lookup", "path": "ngram:min=1,max=3"}]
    return {"name": "*", "drafts": drafts, "gamma": 3} | more


def settings_of(**more: Any) -> Settings:
    return Settings(models=[model_entry(**more)], shadow={"device": "cpu", "threads": 1})


def send(store: Store, records: Sequence[Record]) -> None:
    with store.write() as session:
        samples.add(session, [(one, ("incumbent", "lookup")) for one in records], now=time.time(), max_segments=9)


def ended(store: Store) -> dict[str, list[tuple[str, str | None]]]:
    """State and reason of all work, by draft."""
    with store.read() as session:
        rows = session.query(Work.draft, Work.state, Work.reason).order_by(Work.id).all()
    return {name: [(state, reason) for draft, state, reason in rows if draft == name] for name in {r[0] for r in rows}}


def test_work_waits_for_an_engine_that_is_away(
    sqlite_store: Store, sglang: SmallSglang, bare: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other draft is judged meanwhile, fresh work goes first, no attempt is counted, nothing is lost, and it is
    said once that the engine is away, and once that it is back."""
    caplog.set_level("INFO")
    with sglang.running() as url:
        port = int(url.rpartition(":")[2])
    states = {"url": url, "layers": list(LAYERS)}
    worker = Worker(settings_of(target=str(bare), hidden_states=states), sqlite_store)
    send(sqlite_store, trace("eagle3.T0")[:3])
    assert worker.step() == 3
    for _ in range(work.ATTEMPTS + 2):
        assert worker.step() == 0
    assert ended(sqlite_store) == {"incumbent": [("pending", None)] * 3, "lookup": [("done", None)] * 3}
    send(sqlite_store, trace("eagle3.T0")[3:4])
    assert worker.step() == 1
    with sglang.running(port):
        while worker.step():
            pass
    assert ended(sqlite_store) == {"incumbent": [("done", None)] * 4, "lookup": [("done", None)] * 4}
    assert caplog.text.count("its samples are tried again") == 1
    assert caplog.text.count("draft incumbent of model * is judged again") == 1


@pytest.mark.parametrize("more", [{}, {"rule": "rejection", "target": str(TARGET), "hidden_states": True}])
def test_without_its_target_a_head_is_live_only(
    sqlite_store: Store, bare: Path, more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, and the other draft is judged."""
    if "hidden_states" in more:
        more = more | {"hidden_states": {"url": NOBODY, "layers": list(LAYERS)}}
    worker = Worker(settings_of(**more), sqlite_store)
    assert "draft incumbent of model *: live figures only: " in caplog.text
    send(sqlite_store, [one.model_copy(update={"temperature": 0.0}) for one in trace("eagle3.T0")[:2]])
    assert worker.step() == 4
    assert ended(sqlite_store) == {"incumbent": [("skipped", "no_target")] * 2, "lookup": [("done", None)] * 2}


def test_doctor_says_what_is_live_only(tmp_path: Path) -> None:
    file = tmp_path / "driftwatch.yaml"
    file.write_text(json.dumps({"models": [model_entry()]}))
    said = CliRunner().invoke(doctor, ["--config", str(file)]).output
    assert "warning  draft " in said
    assert "live figures only: draft" in said
    assert "an EAGLE-3 head reads its target's hidden states; give the target's folder too, or an engine" in said


def test_doctor_asks_the_engine(sglang: SmallSglang, bare: Path, tmp_path: Path) -> None:
    file = tmp_path / "driftwatch.yaml"
    with sglang.running() as url:
        states = {"url": url, "layers": list(LAYERS)}
        file.write_text(json.dumps({"models": [model_entry(target=str(bare), hidden_states=states)]}))
        said = CliRunner().invoke(doctor, ["--config", str(file)]).output
        assert f"{url} gives hidden_states [2, 4, 5]" in said
        assert "reads hidden_states [2, 4, 5] of 8 layers" in said
        assert "not tried out: an engine runs the target" in said
        sglang.layers = (2, 4)
        said = CliRunner().invoke(doctor, ["--config", str(file)]).output
        assert "values a token, 3 layers" in said
    said = CliRunner().invoke(doctor, ["--config", str(file)]).output
    assert "problem  draft" in said
    assert "is the engine running? (hidden_states.url)" in said


def test_replay_command_on_an_engine(sglang: SmallSglang, bare: Path, tmp_path: Path) -> None:
    lines = (DATA / "traces" / "eagle3.T0.jsonl").read_text().splitlines(keepends=True)
    few = tmp_path / "few.jsonl"
    few.write_text("".join(lines[:6]))
    options = [str(few), "--draft", str(EAGLE3), "--gamma", "3", "--json"]

    def run(*more: str) -> Result:
        return CliRunner().invoke(command, [*options, *more])

    local = json.loads(run("--target", str(TARGET)).output)
    with sglang.running() as url:
        states = json.dumps({"url": url, "layers": list(LAYERS)})
        remote = json.loads(run("--target", str(bare), "--hidden-states", states).output)
    assert remote["gamma"] == local["gamma"]
    assert "agreement" not in remote
    wrong = {
        "is the engine running?": ("--target", str(bare), "--hidden-states", states),
        "layers: Field required": ("--hidden-states", '{"url": "http://h:1"}'),
        "--hidden-states needs --target": ("--hidden-states", states),
    }
    for message, arguments in wrong.items():
        with pytest.raises(DriftwatchError, match=re.escape(message)):
            raise run(*arguments).exception or AssertionError(message)
