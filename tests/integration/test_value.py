"""What speculation is worth, through control on both databases: a profile and samples in, figures and events out.

Figures are compared with those that the pure functions of ``economics`` give of all requests at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from driftwatch.acceptance import Weights, tally
from driftwatch.control import untrained
from driftwatch.control.app import create_app
from driftwatch.control.judge import fold
from driftwatch.drift.sums import Sums
from driftwatch.economics.load import at_rate
from driftwatch.economics.profile import Bound, CostProfile
from driftwatch.economics.step import StepTime
from driftwatch.economics.tail import tail
from driftwatch.economics.value import best, end_to_end, gain, of_sums
from driftwatch.errors import ProfileError
from driftwatch.settings import Settings
from driftwatch.store import replays, work
from driftwatch.store.connection import Store
from driftwatch.store.replays import Judged

from .test_causes import GAMMA, SETTINGS, TOKENS, Stream, row
from .test_control import metrics

DATA = Path(__file__).parents[1] / "data"
PROFILE = CostProfile.entered(
    Bound("GPU-A", "bfloat16", "target-1", "f"), StepTime(floor=0.02, slope=0.0004), StepTime(floor=0.002)
)
"""A window of 3 proposals costs 1.36 plain steps alone, and 2.04 at a batch of 32."""


@dataclass(frozen=True)
class Kind:
    """What requests are like."""

    rates: tuple[float, ...] = (0.8,)
    running: float | None = None
    timing: tuple[float, float] | None = None
    """Seconds to the first token, and of all."""


class Requests(Stream):
    """Requests of one kind, each with one of its hit rates in turn."""

    kind = Kind()

    def more(self, kind: Kind, count: int) -> None:
        self.kind = kind
        batch = [self._one() for _ in range(count)]
        self.give([record for record, _ in batch], [verdict for _, verdict in batch])
        fold(self.store, self.settings, time.time())

    def _one(self) -> tuple[dict[str, Any], dict[str, Any]]:
        self.sent += 1
        rate = self.kind.rates[self.sent % len(self.kind.rates)]
        weights = Weights((self.rng.random((TOKENS, 1)) < rate).astype(float))
        record: dict[str, Any] = {
            "id": f"r{self.sent}",
            "ts": _at(self, 10.0 * self.sent),
            "labels": {"tenant": "a"},
            "model": "m",
            "prompt_token_ids": [1, 2],
            "output_token_ids": list(range(TOKENS + 1)),
        }
        if self.kind.running is not None:
            record["engine"] = {"running": self.kind.running}
        if self.kind.timing is not None:
            record["timing"] = {"ttft_s": self.kind.timing[0], "e2e_s": self.kind.timing[1]}
        return record, row(weights, "none", "f", None)

    def value(self) -> dict[str, Any]:
        (cell,) = self.client.get("/v1/segments/tenant=a").json()["cells"]
        found: dict[str, Any] = cell["value"]
        return found

    def judged(self) -> list[Judged]:
        with self.store.read() as session:
            return replays.all_judged(session)


def _at(stream: Stream, seconds: float) -> str:
    return (stream.begin + timedelta(seconds=seconds)).isoformat()


@pytest.fixture(autouse=True)
def _nothing_is_logged_as_a_bug(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Announcements that do not fit their published schema among them."""
    yield
    assert [one.message for one in caplog.records if "bug" in one.message] == []


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE.to_json()))
    return path


@contextmanager
def running(store: Store, model: dict[str, Any], **more: Any) -> Iterator[Requests]:
    draft = {"name": "incumbent", "path": "unused"}
    settings = Settings(**SETTINGS | {"models": [{"drafts": [draft], "gamma": GAMMA} | model]} | more)
    with TestClient(create_app(store, settings)) as client:
        yield Requests(store, settings, client)


def near(found: list[float | None], *expected: float | None) -> None:
    assert found == pytest.approx(list(expected), rel=1e-9)


def test_every_figure_is_that_of_all_requests_at_once(store: Store, profile: Path) -> None:
    value = {"gpu_hour_price": 3.6, "gpus": 2}
    with running(store, {"profile": str(profile)}, value=value) as stream:
        stream.more(Kind((0.9, 0.8, 0.8, 0.1), running=9.0, timing=(0.2, 1.0)), 400)
        found, exported = stream.value(), metrics(stream.client)
        tallies = [tally(one.weights) for one in stream.judged()]
    sums = sum(map(Sums.request, tallies), Sums.zero(8))
    values = of_sums(sums, PROFILE, batch=9.0)
    now = values[GAMMA - 1]
    window = PROFILE.window_s(9.0, GAMMA)
    token_s = window / (now.length.value or 0.0)
    # Eight run beside each request: Little's law, backwards.
    rate = 8.0 / (TOKENS * token_s)
    load = at_rate(PROFILE, now.length, gamma=GAMMA, rate=rate, tokens=TOKENS)
    assert load.speculative.seen == pytest.approx(9.0)
    assert found["compared_at"] == "arrival rate"
    assert found["batch"] == {"value": 9.0, "origin": "engine", "requests": 400}
    assert found["costs"]["costs"] == "entered"
    assert (found["costs"]["device"], found["costs"]["mismatches"]) == ("GPU-A", [])
    assert found["break_even_acceptance_length"] == pytest.approx(window / PROFILE.plain_s(9.0))
    near(found["speedup"], load.speedup.value, load.speedup.lower, load.speedup.upper)
    share = 0.2 / (0.2 + 0.8 * (load.speedup.value or 0.0))
    assert found["plain_prefill_share"] == pytest.approx(share)
    near(found["end_to_end_speedup"], *(end_to_end(x or 0.0, share) for x in load.speedup.to_json()))
    at_all = [one.under(PROFILE, rate=rate, tokens=TOKENS) for one in values]
    top = best(at_all)
    assert top is not None
    assert found["best_gamma"] == top.gamma
    assert found["best_gamma_gain"] == pytest.approx(gain(top, at_all[GAMMA - 1]))
    assert load.window is not None
    steps = [float(one.steps[GAMMA - 1]) for one in tallies]
    single = tail(steps, [one.tokens for one in tallies], window=load.window)
    for q, at in single.relative.items():
        assert found["tail"]["relative"][f"{q:g}"] == pytest.approx(at.to_json(), abs=0.005)
    assert found["tail"]["slower"][0] == pytest.approx(single.slower.value, abs=0.01)
    assert 0.2 < found["tail"]["slower"][0] < 0.3
    assert found["tail"]["shape"] == "split"
    per_second = 1e6 * 3.6 * 2 / 3600
    assert found["price"]["plain"] == pytest.approx(per_second * PROFILE.plain_s(9.0) / 9.0)
    assert found["price"]["speculative"][0] == pytest.approx(per_second * token_s / 9.0)

    key = (("draft", "incumbent"), ("model", "m"), ("segment", "tenant=a"), ("split", "none"))

    def told(name: str, **labels: str) -> float:
        return exported[f"driftwatch_{name}"][tuple(sorted([*key, *labels.items()]))]

    for side, at in zip(("", "_lower", "_upper"), found["speedup"], strict=True):
        assert told(f"speedup_ratio{side}") == pytest.approx(at)
    for side, at in zip(("", "_lower", "_upper"), found["tail"]["slower"], strict=True):
        assert told(f"slower_requests_ratio{side}") == pytest.approx(at)
    for name in ("0.5", "0.95", "0.99"):
        assert told("token_time_ratio", quantile=name) == pytest.approx(found["tail"]["relative"][name][0])
    assert told("token_time_ratio_lower", quantile="0.99") > 1.0 > told("token_time_ratio_upper", quantile="0.5")
    assert told("break_even_acceptance_length") == pytest.approx(found["break_even_acceptance_length"])
    assert told("best_gamma") == top.gamma
    assert told("batch", origin="engine") == 9.0
    assert told("cost_per_million_tokens", mode="plain") == pytest.approx(found["price"]["plain"])
    assert 0.5 < told("baseline_hit_rate") < 0.8


def test_what_is_not_known_is_absent(store: Store, profile: Path) -> None:
    names = ("break_even_acceptance_length", "speedup_ratio", "slower_requests_ratio", "token_time_ratio", "best_gamma")
    with running(store, {}) as stream:
        stream.more(Kind(), 30)
        assert stream.value() is None
        assert not [name for name in names if f"driftwatch_{name}" in metrics(stream.client)]
    with running(store, {"break_even": 2.0}) as stream:
        found, exported = stream.value(), metrics(stream.client)
        assert (found["break_even_acceptance_length"], found["costs"]["costs"]) == (2.0, "entered")
        assert found["speedup"][0] == pytest.approx(found["acceptance_length"][0] / 2.0)
        assert (found["best_gamma"], found["price"], found["end_to_end_speedup"]) == (None, None, [None] * 3)
        assert "driftwatch_best_gamma" not in exported
        assert "driftwatch_end_to_end_speedup_ratio" not in exported
    with running(store, {"profile": str(profile)}) as stream:
        found = stream.value()
        assert found["batch"] == {"value": 1.0, "origin": "assumed", "requests": 0}
        assert found["compared_at"] == "batch"
    with running(store, {"profile": str(profile), "batch": 16}) as stream:
        found = stream.value()
        assert found["batch"] == {"value": 16.0, "origin": "settings", "requests": 0}
        assert found["break_even_acceptance_length"] == pytest.approx(PROFILE.cost(16, GAMMA).window)


def test_a_profile_of_other_weights_is_told_and_used(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    other = CostProfile.entered(Bound("GPU-A", "float16", "t", "other"), PROFILE.target)
    fitted = other.to_json() | {"draft": PROFILE.drafting.to_json(), "draft_provenance": "measured"}
    path.write_text(json.dumps(fitted))
    with running(store, {"profile": str(path)}) as stream:
        stream.more(Kind(), 30)
        found = stream.value()
    assert found["costs"]["mismatches"] == ["the draft's weights are f, the profile is of other"]
    assert found["speedup"][0] > 1.0


def test_a_profile_that_cannot_be_used_stops_control_in_one_line(sqlite_store: Store, tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    for text, said in (("{}", "`batches`"), ("a: [", "neither JSON nor YAML"), (None, "No such file")):
        if text is not None:
            path.write_text(text)
        else:
            path = tmp_path / "missing.json"
        with pytest.raises(ProfileError, match=said) as caught:
            create_app(sqlite_store, Settings(models=[{"profile": str(path)}]))
        assert "\n" not in str(caught.value)
    path = tmp_path / "plain.json"
    path.write_text(json.dumps(CostProfile.entered(PROFILE.bound, PROFILE.target).to_json()))
    with pytest.raises(ProfileError, match="has no draft"):
        create_app(sqlite_store, Settings(models=[{"profile": str(path)}]))


@pytest.mark.parametrize(("rate", "action"), [(0.6, "lower_gamma"), (0.35, "disable_speculation")])
def test_a_load_that_grows_is_the_cause_and_says_what_to_do(
    store: Store, profile: Path, rate: float, action: str
) -> None:
    """Hit rates as before. A shorter window would still pay at that arrival rate, or not even that."""
    with running(store, {"profile": str(profile)}) as stream:
        stream.more(Kind((rate,), running=2.0), 400)
        assert stream.events("below_break_even", "slower", "drift") == []
        stream.more(Kind((rate,), running=120.0), 500)
        (below,) = stream.events("below_break_even")
        assert (below["cause"], below["details"]["action"]) == ("load", action)
        assert "batches are larger" in below["details"]["evidence"]
        assert stream.events("drift") == []
        assert (stream.value()["best_gamma"] == 0) == (action == "disable_speculation")


def test_a_load_that_stays_is_not_the_cause(store: Store, profile: Path) -> None:
    with running(store, {"profile": str(profile)}) as stream:
        stream.more(Kind((0.75,), running=40.0), 400)
        stream.more(Kind((0.65,), running=40.0), 900)
        for event in stream.events("below_break_even", "slower"):
            assert event["details"]["findings"]["load_up"] is False
            assert event["cause"] != "load"


def test_a_tail_that_gets_slower_while_the_median_gets_faster(store: Store, profile: Path) -> None:
    with running(store, {"profile": str(profile)}) as stream:
        stream.more(Kind((0.9,)), 400)
        assert stream.events() == []
        stream.more(Kind((0.9,) * 9 + (0.02,)), 300)
        (event,) = stream.events("tail_worse")
        details = event["details"]
        assert 0.01 < details["current"]["lower"] < details["current"]["value"] < details["current"]["upper"] < 0.5
        assert details["limit"] == 0.01
        assert "driftwatch.drift.opened" in stream.sent_types()
        key = (("cause", "unknown"), ("draft", "incumbent"), ("kind", "tail_worse"), ("model", "m"))
        labels = tuple(sorted([*key, ("segment", "tenant=a"), ("split", "none")]))
        assert metrics(stream.client)["driftwatch_drift_active"][labels] == 1.0
        stream.more(Kind((0.9,)), 300)
        assert stream.events("tail_worse")[0]["closed_at"] is None, "half of a hundredth takes long to tell"
        stream.more(Kind((0.9,)), 1200)
        assert stream.events("tail_worse")[0]["closed_at"] is not None


def test_what_is_slower_throughout_is_no_matter_of_the_tail(store: Store, profile: Path) -> None:
    with running(store, {"profile": str(profile)}) as stream:
        stream.more(Kind((0.05,)), 400)
        assert stream.events("tail_worse") == []
        assert stream.events("below_break_even") != []


def test_what_a_real_engine_reported_is_worth_without_a_replay(store: Store, profile: Path) -> None:
    """Requests of vLLM 0.32 with a chain draft, gamma 3: lengths are the engine's own, costs those of the profile."""
    lines = (DATA / "traces" / "draft3.T0.jsonl").read_text().splitlines()
    rows = [json.loads(line) | {"labels": {"tenant": "a"}} for line in lines]
    engines = [one["engine"] for one in rows]
    length = 1.0 + sum(one["accepted"] for one in engines) / sum(one["windows"] for one in engines)
    with running(store, {"profile": str(profile), "drafts": [{"name": "incumbent"}], "batch": 4}) as stream:
        stream.client.post("/v1/samples", json=rows).raise_for_status()
        fold(store, stream.settings, time.time())
        (segment,) = stream.client.get("/v1/segments").json()["segments"]
        exported = metrics(stream.client)
    (cell,) = segment["cells"]
    found = cell["value"]
    assert (cell["channel"], found["gamma"]) == ("live", 3)
    assert found["acceptance_length"][0] == pytest.approx(length)
    assert found["break_even_acceptance_length"] == pytest.approx(PROFILE.cost(4, 3).window)
    assert found["speedup"][1] < found["speedup"][0] < found["speedup"][2]
    (told,) = exported["driftwatch_live_speedup_ratio"].values()
    assert told == pytest.approx(found["speedup"][0])
    assert "driftwatch_speedup_ratio" not in exported


class Pairs(Requests):
    """Each request is replayed by a trained draft and by prompt lookup, which stands by a hit rate of its own."""

    lookup = 0.0

    def __init__(self, store: Store, settings: Settings, client: TestClient) -> None:
        super().__init__(store, settings, client)
        self.lookups: list[Weights] = []

    def _one(self) -> tuple[dict[str, Any], dict[str, Any]]:
        record, verdict = super()._one()
        self.lookups.append(Weights((self.rng.random((TOKENS, 1)) < self.lookup).astype(float)))
        return record, verdict

    def give(self, records: Any, rows: Any) -> None:
        assert self.client.post("/v1/samples", json=list(records)).json()["stored"] == len(records)
        trained, looked = iter(rows), iter(self.lookups)
        with self.store.write() as session:
            while tasks := work.lease(session, "test", now=time.time(), lease_s=60, limit=100):
                verdicts = [
                    work.Verdict(
                        task,
                        replay=next(trained) if task.draft == "incumbent" else row(next(looked), "none", "n", None),
                    )
                    for task in tasks
                ]
                work.complete(session, "test", verdicts, now=time.time())
        self.lookups = []


@pytest.mark.parametrize(
    ("lookup", "count", "verdict"),
    [
        (0.8, 120, "you would do as well without a trained draft here"),
        (0.2, 120, "the trained draft is faster here"),
        (0.6, 5, "not enough data"),
    ],
)
def test_prompt_lookup_beside_a_trained_draft(
    store: Store, profile: Path, lookup: float, count: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    compare = untrained.beside

    def counted(session: Any, settings: Settings, segment: str, cells: Any) -> Iterator[untrained.Untrained]:
        compared.append(segment)
        return compare(session, settings, segment, cells)

    monkeypatch.setattr(untrained, "beside", counted)
    drafts = [{"name": "incumbent", "path": "unused"}, {"name": "lookup", "path": "ngram:min=1,max=3"}]
    settings = Settings(**SETTINGS | {"models": [{"drafts": drafts, "gamma": GAMMA, "profile": str(profile)}]})
    with TestClient(create_app(store, settings)) as client:
        stream = Pairs(store, settings, client)
        stream.lookup = lookup
        stream.more(Kind((0.8,)), count)
        segment = client.get("/v1/segments/tenant=a").json()
        (listed,) = client.get("/v1/segments").json()["segments"]
        exported = metrics(client)
    assert compared == ["tenant=a"] * 2, "once for the segment's own, once for the list and the metrics together"
    (found,) = segment["untrained"]
    assert listed["untrained"] == [found]
    labels = (("draft", "lookup"), ("model", "m"), ("segment", "tenant=a"))
    for side in ("", "_lower", "_upper"):
        told = exported[f"driftwatch_untrained_time_difference_ratio{side}"][labels]
        assert told == pytest.approx(found["difference"][side.removeprefix("_") or "value"])
    assert found["verdict"] == verdict
    assert found["difference"]["requests"] == count
    cells = {cell["draft"]: cell["value"] for cell in segment["cells"]}
    assert cells["lookup"]["break_even_acceptance_length"] < cells["incumbent"]["break_even_acceptance_length"]
    assert cells["lookup"]["costs"]["costs"] == "entered"


ENTERED = "batches: [{batch: 1, step_ms: 20, c: 0.1, v: {3: 1.1, 8: 1.2}}, {batch: 32, step_ms: 30, c: 0.1, v: {3: 2}}]"


def test_costs_entered_without_a_context_hold_at_any(store: Store, tmp_path: Path) -> None:
    """Nobody who writes c and v by hand knows a context: verdict and best length are there all the same."""
    path = tmp_path / "costs.yaml"
    path.write_text(ENTERED)
    with running(store, {"profile": str(path)}) as stream:
        stream.more(Kind((0.9,)), 60)
        found, exported = stream.value(), metrics(stream.client)
    assert found["context"] > 0.0
    assert found["outside"] == []
    assert found["costs"]["priced_as"] == "chain"
    assert found["verdict"]["decision"] in ("use", "use_with_gamma")
    assert found["best_gamma"] >= 3
    assert "driftwatch_best_gamma" in exported


def test_a_block_is_priced_as_one_pass(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "costs.yaml"
    found = {}
    for shape in ("chain", "block"):
        path = tmp_path / f"{shape}.yaml"
        path.write_text(f"{ENTERED}\nshape: {shape}")
        with running(store, {"profile": str(path)}) as stream:
            if shape == "chain":
                stream.more(Kind((0.9,)), 60)
            found[shape] = stream.value()
    assert found["chain"]["break_even_acceptance_length"] == pytest.approx(3 * 0.1 + 1.1, rel=0.02)
    assert found["block"]["break_even_acceptance_length"] == pytest.approx(0.1 + 1.1, rel=0.02)
    assert found["block"]["costs"]["costs"] == "entered, priced as a block"
    assert found["block"]["best_gamma"] >= found["chain"]["best_gamma"]


def test_limits_on_waiting_are_exported(store: Store) -> None:
    with running(store, {}, slo={"ttft_s": 0.5}) as stream:
        stream.begin = stream.begin.__class__.now(stream.begin.tzinfo) - timedelta(minutes=40)
        stream.more(Kind(timing=(0.9, 1.0)), 150)
        exported = metrics(stream.client)
        slo = stream.client.get("/v1/segments/tenant=a").json()["slo"]
    (one,) = slo
    assert one["state"] == "page"
    key = (("figure", "ttft"), ("segment", "tenant=a"))
    assert exported["driftwatch_slo_burn_rate"][tuple(sorted([*key, ("window", "1h")]))] == pytest.approx(100.0)
    assert exported["driftwatch_slo_state"][tuple(sorted([*key, ("state", "page")]))] == 1.0
    assert exported["driftwatch_slo_limit_seconds"][("figure", "ttft"),] == 0.5
