"""Records become requests, and drafts are judged on them in their order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from driftwatch.acceptance import tally
from driftwatch.errors import DriftwatchError
from driftwatch.evaluate.request import Clock
from driftwatch.evaluate.sample import LOOKAHEAD, NGRAM, Sample
from driftwatch.records import read_records
from driftwatch.shadow.chain import ChainDraft
from driftwatch.shadow.history import replay_records
from driftwatch.shadow.open import Opening
from driftwatch.shadow.target import Target
from driftwatch.shadow.tokenizer import Retokeniser

DATA = Path(__file__).parents[2] / "data"
TRACE = DATA / "traces" / "draft3.T0.jsonl"
CPU = torch.device("cpu")


def nothing(name: str, total: int) -> None:
    pass


def written(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def record(id: str, tokens: int = 5, **fields: Any) -> dict[str, Any]:
    return {"id": id, "prompt_token_ids": [1, 2, 3], "output_token_ids": list(range(4, 4 + tokens)), **fields}


def test_what_a_request_is(tmp_path: Path) -> None:
    timing = {"ttft_s": 0.5, "tpot_s": 0.01}
    lines = [
        record("a", labels={"tenant": "x", "other": "y"}, timing=timing, session="s", weight=2.0),
        record("b", timing={"ttft_s": 0.5, "e2e_s": 0.9}),
        record("c", timing={"tpot_s": 0.01}),
    ]
    one, other, third = Sample([written(tmp_path / "r.jsonl", lines)], ["tenant"], None).requests
    assert (one.segment, one.tokens, one.context, one.session, one.weight) == ("tenant=x", 4, 5.5, "s", 2.0)
    assert one.recorded == Clock(0.5, pytest.approx(0.04), 4)  # type: ignore[arg-type]
    assert (other.segment, other.recorded) == ("tenant=none", Clock(0.5, pytest.approx(0.4), 4))  # type: ignore[arg-type]
    assert third.recorded is None


def test_what_is_no_part_of_the_sample_is_counted(tmp_path: Path) -> None:
    lines = [
        record("a"),
        record("b", tokens=1),
        record("c", purpose="mining"),
        {"id": "d", "prompt": "p", "output": "o"},
    ]
    path = written(tmp_path / "r.jsonl", lines)
    found = Sample([path], [], None)
    assert [one.id for one in found.requests] == ["a"]
    assert found.skipped == {"records": {"too_short": 1, "mining": 1, "no_tokenizer": 1}}
    with pytest.raises(DriftwatchError, match=r"no request to evaluate: mining \(1\)"):
        Sample([written(path, lines[2:3])], [], None)


def test_a_share_is_the_same_in_every_run_and_names_each_record_once(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", [record(str(i % 30)) for i in range(40)])
    found = Sample([path], [], None).share(10)
    assert found == Sample([path], [], None).share(10)
    assert len({one.id for _, one, _ in found}) == len(found)
    assert len(found) <= 10
    assert all(tokens == 5 for *_, tokens in found)


def test_drafts_are_judged_as_replay_judges_them() -> None:
    how = Opening(CPU, torch.float32, prefill_tokens=4096)
    found = Sample([TRACE], ["domain"], None)
    draft = found.trained(str(DATA / "models" / "chain"), how, None, None, nothing)
    ngram = found.ngram(NGRAM, how, None, nothing)
    assert (draft.kind, ngram.kind, ngram.profile) == ("trained", "ngram", None)
    chain = ChainDraft.load(DATA / "models" / "chain", device=CPU, dtype=torch.float32)
    outcomes = replay_records(chain, read_records([TRACE]), batch_tokens=4096)
    for request, outcome in zip(found.requests, outcomes, strict=True):
        assert request.id == outcome.record.id
        assert outcome.weights is not None
        expected = tally(outcome.weights, how.depths)
        assert request.tallies[draft.name].accepted.tolist() == expected.accepted.tolist()
        assert NGRAM in request.tallies


def test_lookahead_is_run_on_its_share() -> None:
    target = Target(DATA / "models" / "target", device=CPU, dtype=torch.float32)
    found = Sample([TRACE], [], None)
    draft = found.lookahead(LOOKAHEAD.replace("requests=20", "requests=3"), target, None, nothing)
    judged = [one for one in found.requests if draft.name in one.tallies]
    assert (draft.kind, draft.chosen, len(judged)) == ("lookahead", 3, 3)
    assert draft.fed_per_step is not None
    assert draft.fed_per_step > 5.0  # the window alone


def test_requests_that_came_to_nothing_are_counted(tmp_path: Path) -> None:
    empty = [{"id": "e", "prompt_token_ids": [1], "output_token_ids": []}]
    found = Sample([written(tmp_path / "r.jsonl", [record("a"), *empty])], [], None)
    assert found.skipped == {"records": {"too_short": 1}}


def test_text_is_marked(tmp_path: Path) -> None:
    lines = [record("a"), {"id": "t", "prompt": "def f(x):", "output": "    return x + 1"}]
    found = Sample([written(tmp_path / "r.jsonl", lines)], [], Retokeniser(DATA / "models" / "chain"))
    assert [one.retokenised for one in found.requests] == [False, True]
