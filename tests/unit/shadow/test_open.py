"""Kinds of drafts are told apart, what cannot be replayed is refused by name, and the commands and worker follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from driftwatch.cli.replay import replay as command
from driftwatch.errors import ModelError
from driftwatch.settings import Settings
from driftwatch.shadow.chain import ChainDraft
from driftwatch.shadow.eagle3.checkpoint import Checkpoint
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.ngram import NgramDraft
from driftwatch.shadow.open import Opening, kind_of, open_draft
from driftwatch.shadow.target import Target
from driftwatch.shadow.worker import Worker
from driftwatch.store.connection import Store
from driftwatch.store.work import Task

from .conftest import CPU, DATA, tokens_of, trace

CHAIN, EAGLE3, TARGET = (DATA / "models" / name for name in ("chain", "eagle3", "target"))
OPENING = Opening(CPU, torch.float32, depths=4)


def test_kinds(target: Target) -> None:
    assert isinstance(open_draft(CHAIN, OPENING), ChainDraft)
    assert isinstance(open_draft(EAGLE3, OPENING, target), Eagle3Draft)
    assert isinstance(open_draft(EAGLE3 / "model.safetensors", OPENING, target), Eagle3Draft)
    assert isinstance(open_draft("ngram:min=1,max=3", OPENING), NgramDraft)


def test_a_chain_under_argmax_leaves_its_target_alone() -> None:
    lazy = Target(TARGET, device=CPU, dtype=torch.float32)
    open_draft(CHAIN, OPENING, lazy)
    assert not lazy.loaded
    missing = Target(Path("nowhere"), device=CPU, dtype=torch.float32)
    open_draft(CHAIN, OPENING, missing)
    with pytest.raises(ModelError, match="target nowhere"):
        open_draft(EAGLE3, OPENING, missing)


def folder(path: Path, config: dict[str, Any], names: tuple[str, ...] = ("fc.weight",)) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(2) for name in names}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["DSparkDraftModel"]}, "a DSpark draft"),
        ({"architectures": ["DFlash2DraftModel"]}, "a DFlash 2 draft"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "latent attention"),
        ({"speculators_model_type": "dflash"}, "a speculators draft of type 'dflash'"),
        ({"architectures": ["LlamaForCausalLM"]}, "an EAGLE-1 or EAGLE-2 head"),
    ],
)
def test_other_kinds_are_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        kind_of(folder(tmp_path / "draft", config))


def test_what_is_no_draft_is_refused(tmp_path: Path) -> None:
    (tmp_path / "training_state.pt").touch()
    with pytest.raises(ModelError, match="export it first"):
        kind_of(tmp_path)
    with pytest.raises(ModelError, match="give the target's folder too"):
        open_draft(EAGLE3, OPENING)
    with pytest.raises(ModelError, match="lookahead decoding is run with the target"):
        kind_of("lookahead:window=5,ngram=3,guesses=5")


def run(*arguments: str, exit_code: int = 0) -> str:
    done = CliRunner().invoke(command, list(arguments))
    assert done.exit_code == exit_code, done.output
    return done.output


def test_replay_command(tmp_path: Path) -> None:
    """The engine's boundaries are not followed here: the walk's own windows stay within half a per cent of its."""
    lines = tmp_path / "lines.jsonl"
    file = str(DATA / "traces" / "eagle3.T0.jsonl")
    options = ("--draft", str(EAGLE3), "--target", str(TARGET), "--gamma", "3", "--json")
    report = json.loads(run(file, *options, "--per-request", str(lines), "--by", "domain"))
    assert report["draft"]["kind"] == "eagle3"
    assert set(report["gamma"]) == {"1", "2", "3"}
    assert report["gamma"]["3"]["windows"] == pytest.approx(2870, rel=0.005)
    assert report["agreement"]["tokens"] == 72 * 63
    assert len(report["agreement"]["argmax_match"]) == 3
    assert len(lines.read_text().splitlines()) == 72
    without = json.loads(run(file, *options, "--no-agreement"))
    assert "agreement" not in without
    assert without["gamma"] == report["gamma"]


def test_replay_command_under_rejection(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    records = trace("draft3prob.T0.8")[:4]
    unknown = records[0].model_copy(update={"id": "unknown", "temperature": None})
    file.write_text("".join(one.model_dump_json(exclude_none=True) + "\n" for one in (*records, unknown)))
    options = ("--draft", str(CHAIN), "--target", str(TARGET), "--rule", "rejection", "--json")
    report = json.loads(run(str(file), *options))
    assert report["requests"] == 4
    assert report["skipped"] == {"sampling_unknown": 1}
    assert report["rule"] == "rejection"
    assert report["agreement"]["tokens"] == 4 * 63


def task(number: int, draft: str) -> Task:
    record = trace("eagle3.T0.8")[number]
    sample = tokens_of(record)
    return Task(
        work_id=number,
        sample_id=number,
        draft=draft,
        model="m",
        segment="all",
        prompt_ids=list(sample.prompt),
        output_ids=list(sample.output),
        text=None,
        temperature=record.temperature,
        top_p=record.top_p,
        top_k=record.top_k,
    )


@pytest.mark.parametrize("rule", ["argmax", "rejection"])
def test_worker(rule: Any, sqlite_store: Store, eagle3: Checkpoint, target: Target) -> None:
    drafts = [{"name": "incumbent", "path": str(EAGLE3)}, {"name": "chain", "path": str(CHAIN)}]
    drafts.append({"name": "lookup", "path": "ngram:min=1,max=3"})
    model = {"name": "*", "target": str(TARGET), "drafts": drafts, "gamma": 3, "rule": rule}
    settings = Settings(models=[model], shadow={"device": "cpu", "threads": 1})
    worker = Worker(settings, sqlite_store)
    names = ("incumbent", "chain", "lookup")
    found = {verdict.task.draft: verdict.replay for verdict in worker.judge([task(0, name) for name in names])}
    assert set(found) == set(names)
    expected = Eagle3Draft(eagle3, target, depths=8, rule=rule).replay([tokens_of(trace("eagle3.T0.8")[0])])[0]
    row = found["incumbent"]
    assert row is not None
    assert row["depths"] == 8
    assert (row["encoding"], row["weights"]) == expected.encode()
    for one in found.values():
        assert one is not None
        assert one["rule"] == rule
