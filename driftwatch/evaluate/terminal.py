"""The report in a terminal."""

from __future__ import annotations

import click
from rich import box
from rich.console import Console
from rich.table import Column
from rich.table import Table as Grid

from driftwatch.evaluate.report import Report, Segment
from driftwatch.evaluate.tables import sections
from driftwatch.evaluate.words import conditions, costs, decision

WIDTH = 110
"""Of tables at least: narrower ones break every figure in two."""


def show(report: Report) -> None:
    console = Console(markup=False, highlight=False)  # names are the user's own
    console.width = max(console.width, WIDTH)
    click.echo(f"{conditions(report)}; {costs(report)}")
    for segment in report.segments:
        _segment(console, segment)
    for name, reasons in report.skipped.items():
        click.echo(f"skipped, {name}: " + ", ".join(f"{reason} ({count})" for reason, count in reasons.items()))
    for note in report.notes:
        click.echo(note)
    grid = Grid(Column("segment", overflow="fold"), "requests", "verdict", "", box=box.SIMPLE, title="verdict")
    for one in report.segments:
        grid.add_row(one.name, str(one.baseline.requests), decision(one.verdict), "; ".join(one.verdict.reasons))
    console.print(grid)


def _segment(console: Console, segment: Segment) -> None:
    console.rule(f"{segment.name}: {decision(segment.verdict)}")
    for section in sections(segment):
        console.print(f"\n{section.title}", style="bold")
        for flag in section.flags:
            console.print(f"! {flag}", style="bold red")
        for sentence in section.sentences:
            click.echo(sentence)
        for table in section.tables:
            grid = Grid(*table.head, box=box.SIMPLE, title=table.caption, title_justify="left")
            for row in table.rows:
                grid.add_row(*row)
            console.print(grid)
    about = "" if segment.about is None else f" ({segment.about})"
    console.print(f"verdict: {decision(segment.verdict)}{about}", style="bold")
    for line in (*segment.verdict.reasons, *segment.verdict.warnings):
        click.echo(f"  {line}")
    for line in segment.would_change:
        click.echo(f"  would change it: {line}")
    click.echo("")
