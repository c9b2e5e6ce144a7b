"""What every command has in common: one line and exit code 2 for wrong use, 130 where it was interrupted."""

from __future__ import annotations

import sys

import click
import pytest

from driftwatch.cli import commands, main


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["driftwatch", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["replay"], "Missing argument 'FILES...'; see `driftwatch replay --help`"),
        (["replay", "x"], "Missing option '--draft'; see `driftwatch replay --help`"),
        (["sketch", "score", "x"], "Missing option '--sketch'; see `driftwatch sketch score --help`"),
        (["evaluate", "x", "--gamma", "0"], "Invalid value for '--gamma': 0 is not in the range 1<=x<=32"),
        (["evaluate", "x", "--price-per-gpu-hour", "0"], "'--price-per-gpu-hour': 0.0 is not in the range x>0"),
        (["replay", "x", "--draft", "y", "--rule", "z"], "'--rule': 'z' is not one of 'argmax', 'rejection'"),
        (["profile", "--nonsense"], "No such option '--nonsense'"),
        (["evalate"], "No such command 'evalate'"),
        (["backtest", "no.jsonl"], "no.jsonl: No such file"),
        (["doctor", "--records", "x"], "--records needs --draft"),
        (["doctor", "--draft", "ngram:min=1,max=3", "--records", "no.jsonl"], "no.jsonl: No such file"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert ended(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (said,) = err.splitlines()
    assert said.startswith("driftwatch: ")
    assert line in said


def test_help_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(monkeypatch, "--help") == ended(monkeypatch, "replay", "--help") == 0
    assert capsys.readouterr().err == ""
    assert ended(monkeypatch) == ended(monkeypatch, "db") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Commands:" in err


def test_what_is_interrupted_is_no_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def stuck() -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(commands.commands, "stuck", stuck)
    assert ended(monkeypatch, "stuck") == 130
    assert capsys.readouterr().err.strip() == "driftwatch: interrupted"
