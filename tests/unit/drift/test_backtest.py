"""The command on files: both kinds of lines, its flags, where alarms point, and one line for what is wrong."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

from driftwatch.cli import commands
from driftwatch.errors import DriftwatchError

if TYPE_CHECKING:
    from .conftest import Traffic

Line = dict[str, Any]
Backtest = Callable[..., Any]


def flat(accepted: float, tested: float, **more: Any) -> Line:
    counts = {
        "steps": 40,
        "windows": tested,
        "drafted": 3 * tested,
        "accepted": accepted,
        "rejected": tested - accepted,
    }
    return {"output_tokens": 100, **counts, **more}


@pytest.fixture
def history(traffic: Traffic) -> list[Line]:
    """1,200 requests, the last 600 with a match probability .12 lower; tenant b only before and never worse."""
    rng = np.random.default_rng(7)
    parts = [traffic(rng, count, match) for count, match in ((600, 0.7), (600, 0.58))]
    counts = [np.concatenate([part[i] for part in parts]).tolist() for i in (0, 1)]
    return [
        flat(a, t, id=f"r{i}", labels={"tenant": "b" if i < 600 and i % 3 == 0 else "a"})
        for i, (a, t) in enumerate(zip(*counts, strict=True))
    ]


@pytest.fixture
def backtest(tmp_path: Path) -> Backtest:
    def run(lines: list[Line] | str, *flags: str) -> Any:
        path = tmp_path / "results.jsonl"
        path.write_text(lines if isinstance(lines, str) else "".join(json.dumps(line) + "\n" for line in lines))
        done = CliRunner().invoke(commands, ["backtest", str(path), *flags])
        if done.exception is not None:
            raise done.exception
        return json.loads(done.stdout)

    return run


def test_finds_the_fall_and_says_where_it_began(history: list[Line], backtest: Backtest) -> None:
    report = backtest(history, "--baseline", "auto:300", "--arl", "10000")
    (alarm,) = report["alarms"]
    assert set(alarm) == {"segment", "index", "id", "start_index", "evidence"}
    assert alarm["segment"] == "all"
    assert 600 <= alarm["index"] < 800
    assert alarm["id"] == f"r{alarm['index']}"
    assert abs(alarm["start_index"] - 600) < 60
    assert alarm["evidence"] >= np.log(10_000)
    segment = report["segments"]["all"]
    assert (segment["requests"], segment["state"], segment["alarms"]) == (1200, "drifting", 1)
    assert segment["baseline"]["requests"] == 300
    assert segment["floor"] == pytest.approx(segment["baseline"]["lower"] - 0.03)


def test_a_given_hit_rate_needs_no_learning_and_a_wide_tolerance_no_alarm(
    history: list[Line], backtest: Backtest
) -> None:
    given = backtest(history, "--baseline", "0.69", "--arl", "10000")
    assert len(given["alarms"]) == 1
    assert given["segments"]["all"]["floor"] == pytest.approx(0.66)
    assert backtest(history, "--baseline", "0.69", "--tolerance", "0.2")["alarms"] == []
    assert backtest(history[:600], "--baseline", "auto:200")["alarms"] == []


def test_segments_by_label(history: list[Line], backtest: Backtest) -> None:
    report = backtest(history, "--baseline", "auto:150", "--by", "tenant", "--by", "region")
    assert [alarm["segment"] for alarm in report["alarms"]] == ["region=none,tenant=a"]
    assert set(report["segments"]) == {"region=none,tenant=a", "region=none,tenant=b"}
    assert report["segments"]["region=none,tenant=b"]["requests"] == 200
    learning = backtest(history, "--baseline", "auto:5000")["segments"]["all"]
    assert (learning["state"], learning["floor"]) == ("learning", None)
    assert learning["baseline"]["missing"] == ["1200 of 5000 requests"]


def test_lines_of_replay_hold_several_gammas(history: list[Line], backtest: Backtest) -> None:
    plain = backtest(history, "--baseline", "0.69")
    nested = [
        {"id": h["id"], "labels": {}, "output_tokens": 100, "gamma": {"2": flat(0, 1), "3": h, "5": flat(1, 1)}}
        for h in history
    ]
    assert backtest(nested, "--baseline", "0.69") == plain
    assert backtest(nested, "--baseline", "0.69", "--gamma", "5")["alarms"] == []
    assert backtest(nested, "--baseline", "0.69", "--gamma", "2")["alarms"][0]["index"] < 60


def test_times_order_the_lines_and_blank_ones_keep_their_number(history: list[Line], backtest: Backtest) -> None:
    start = datetime(2026, 3, 1, tzinfo=UTC)
    timed = [h | {"ts": (start + timedelta(minutes=i)).isoformat()} for i, h in enumerate(history)]
    straight = backtest(timed, "--baseline", "0.69")
    backwards = backtest(timed[::-1], "--baseline", "0.69")
    assert backwards["alarms"][0]["id"] == straight["alarms"][0]["id"]
    assert backwards["alarms"][0]["index"] == 1199 - straight["alarms"][0]["index"]
    text = "\n" + "\n".join(json.dumps(line) for line in timed)
    assert backtest(text, "--baseline", "0.69")["alarms"][0]["index"] == straight["alarms"][0]["index"] + 1


def test_sessions_are_units(history: list[Line], backtest: Backtest) -> None:
    # Two sessions in turn, each of five requests: without times a session is judged at its last line.
    named = [h | {"session": f"s{i // 10}-{i % 2}"} for i, h in enumerate(history)]
    (alarm,) = backtest(named, "--baseline", "0.69", "--arl", "1000")["alarms"]
    assert alarm["index"] % 10 in (8, 9)
    assert alarm["start_index"] % 10 in (0, 1)
    start = datetime(2026, 3, 1, tzinfo=UTC)
    timed = [h | {"ts": (start + timedelta(minutes=i)).isoformat()} for i, h in enumerate(named)]
    (late,) = backtest(timed, "--baseline", "0.69", "--arl", "1000")["alarms"]
    assert 20 <= late["index"] - alarm["index"] <= 45  # half an hour of silence closes a session
    one = [h | {"session": "only"} for h in history]
    assert backtest(one, "--baseline", "auto:100")["segments"]["all"]["baseline"]["missing"] == ["no interval yet"]


def test_reads_compressed_files(history: list[Line], tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(h) for h in history).encode()))
    done = CliRunner().invoke(commands, ["backtest", str(path), "--baseline", "0.69"])
    assert done.exit_code == 0
    assert len(json.loads(done.stdout)["alarms"]) == 1


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("", (), "holds no requests"),
        ('{"id": "a"', (), r"results.jsonl:1: not a JSON object"),
        ("[1]", (), r"results.jsonl:1: "),
        ('\n{"id": "a", "accepted": 3}', (), r"results.jsonl:2: rejected: Field required"),
        ('{"id": "a", "accepted": -1, "rejected": 2}', (), r"results.jsonl:1: accepted: .*got -1"),
        (
            '{"id": "a", "accepted": 1e308, "rejected": 1e308}',
            (),
            r"results.jsonl:1: accepted: .*less than or equal to",
        ),
        ('{"id": "a", "accepted": NaN, "rejected": 1}', (), r"results.jsonl:1: "),
        ('{"id": "a", "accepted": 3, "rejected": 3, "drafted": 2}', (), "accepted 3 is more than drafted 2"),
        ('{"id": "a", "ts": "yesterday", "accepted": 3, "rejected": 3}', (), "results.jsonl:1: ts: "),
        ('{"id": "a", "gamma": {"1": {"accepted": 3, "rejected": 3}}}', (), "no counts for gamma 3; the line holds"),
        ("", ("--baseline", "63"), "--baseline 63: must be a hit rate"),
        ("", ("--baseline", "auto:x"), "auto:N must be a whole number"),
        ("", ("--tolerance", "0"), "--tolerance"),
        ("", ("--arl", "1"), "--arl"),
    ],
)
def test_bad_input_is_one_line(backtest: Backtest, text: str, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(DriftwatchError, match=message) as caught:
        backtest(text, *flags)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    done = CliRunner().invoke(commands, ["backtest", str(tmp_path / "no.jsonl")])
    assert isinstance(done.exception, DriftwatchError)


def test_lines_made_from_text_have_a_report_of_their_own(history: list[Line], backtest: Backtest) -> None:
    """A thousand texts that accept nothing neither alarm nor move what is said of exact requests."""
    text = [flat(0, 20, id=f"t{i}", labels={}, retokenised=True) for i in range(1200)]
    mixed = [line for pair in zip(history, text, strict=True) for line in pair]
    alone, found = backtest(history, "--baseline", "0.69"), backtest(mixed, "--baseline", "0.69")
    apart = found.pop("retokenised")
    assert [alarm["id"] for alarm in found["alarms"]] == [alarm["id"] for alarm in alone["alarms"]]
    assert found["alarms"][0]["index"] == 2 * alone["alarms"][0]["index"], "a line of the whole file"
    assert found["segments"]["all"]["hit_rate"] == alone["segments"]["all"]["hit_rate"]
    assert (apart["segments"]["all"]["requests"], apart["segments"]["all"]["hit_rate"]) == (1200, 0.0)
    only = backtest(text, "--baseline", "auto:500")
    assert only["segments"] == only["retokenised"]["segments"]
