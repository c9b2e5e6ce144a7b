from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from driftwatch.cli.doctor import _engine, _profile
from driftwatch.economics.profile import Bound, CostProfile
from driftwatch.economics.shape import Shape
from driftwatch.economics.step import StepTime
from driftwatch.settings import Model, Settings
from driftwatch.shadow.profile.bound import draft_hash, target_hash


class Guarded(BaseHTTPRequestHandler):
    """An engine that wants a key."""

    def do_GET(self) -> None:
        known = self.headers.get("authorization") == "Bearer sesame"
        self.send_response(200 if known else 401)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_the_engine_is_asked_with_its_key(url: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sesame\n")
    for keyed in ({"token": "sesame"}, {"token_file": str(tmp_path / "key")}):
        assert _engine(Settings(engine={"url": url, **keyed})).level == "ok"


@pytest.mark.parametrize(
    ("keyed", "said"),
    [
        ({}, "answers 401: it wants an API key: set engine.token"),
        ({"token": "wrong"}, "answers 401: it wants another API key than that of engine.token"),
        ({"token_file": "/nowhere/key"}, "`engine.token_file`: /nowhere/key: No such file or directory"),
    ],
)
def test_a_missing_or_wrong_key_is_a_problem_that_says_so(url: str, keyed: dict[str, str], said: str) -> None:
    finding = _engine(Settings(engine={"url": url, **keyed}))
    assert finding.level == "problem"
    assert said in finding.text
    assert "wrong" not in finding.text


MODELS = Path(__file__).parents[2] / "data" / "models"


def profiled(path: Path, draft: Path | str, shape: str = "chain", **bound: str) -> Path:
    named = Bound("GPU-A", "bfloat16", bound.get("target", ""), bound.get("draft", draft_hash(str(draft))))
    made = CostProfile(named, "measured", StepTime(0.02), StepTime(0.002), "measured", shape=Shape.of(shape))
    path.write_text(json.dumps(made.to_json()))
    return path


def found(profile: Path, **model: Any) -> list[tuple[str, str]]:
    entry = {"drafts": [{"path": str(MODELS / "chain")}], "profile": profile} | model
    return [(one.level, one.text) for one in _profile(Model(**entry))]


def test_a_profile_of_this_draft_is_named_with_the_device_that_it_holds_for(tmp_path: Path) -> None:
    path = profiled(tmp_path / "p.json", MODELS / "chain", target=target_hash(MODELS / "target"))
    assert found(path, target=str(MODELS / "target")) == [
        ("ok", "costs measured, of GPU-A bfloat16; the engine's own must be the same")
    ]


def test_a_profile_of_others_is_a_problem(tmp_path: Path) -> None:
    path = profiled(tmp_path / "p.json", MODELS / "eagle3", target="other")
    ((level, said),) = [one for one in found(path, target=str(MODELS / "target")) if one[0] != "ok"]
    assert level == "problem"
    assert said == (
        f"it is not of target {MODELS / 'target'} and draft {MODELS / 'chain'}; measure it again with "
        "`driftwatch profile`"
    )
    tree = f"{MODELS / 'eagle3'}:steps=5,topk=4,tokens=8"
    (_, (level, said)) = found(profiled(path, tree), drafts=[{"path": tree}])
    assert level == "problem"
    assert "costs of a chain, the draft makes a tree of steps=5,topk=4,tokens=8" in said
    assert len(found(profiled(path, tree, "steps=5,topk=4,tokens=8"), drafts=[{"path": tree}])) == 1


def test_a_profile_that_cannot_be_used_is_a_problem(tmp_path: Path) -> None:
    assert found(tmp_path / "none.json")[0][0] == "problem"
    alone = tmp_path / "alone.json"
    alone.write_text(json.dumps(CostProfile.entered(Bound("", "", ""), StepTime(0.02)).to_json()))
    assert found(alone)[1] == (
        "problem",
        f"it has no draft; measure it again with `driftwatch profile` --draft {MODELS / 'chain'}",
    )
    assert len(found(alone, drafts=[{"path": "ngram:min=1,max=3"}])) == 1


def test_only_what_a_profile_prices_is_compared_with_it(tmp_path: Path) -> None:
    tree = f"{MODELS / 'eagle3'}:steps=5,topk=4,tokens=8"
    path = profiled(tmp_path / "tree.json", tree, "steps=5,topk=4,tokens=8")
    lookup, chain = {"name": "lookup", "path": "ngram:min=1,max=3"}, {"name": "new", "path": str(MODELS / "chain")}
    for drafts in ([], [{"path": None}], [{"path": None}, chain], [lookup], [lookup, {"path": tree}]):
        assert [level for level, _ in found(path, drafts=drafts)] == ["ok"]
    assert [level for level, _ in found(path, drafts=[lookup, chain])] == ["ok", "problem", "problem"]
