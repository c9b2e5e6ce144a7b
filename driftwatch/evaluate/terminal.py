"""The report in a terminal."""

from __future__ import annotations

import click
from rich import box
from rich.console import Console
from rich.table import Table as Grid

from driftwatch.evaluate.report import Report, Segment
from driftwatch.evaluate.tables import sections
from driftwatch.evaluate.words import decision


def show(report: Report) -> None:
    console = Console()
    for segment in report.segments:
        _segment(console, segment)
    for name, reasons in report.skipped.items():
        click.echo(f"skipped, {name}: " + ", ".join(f"{reason} ({count})" for reason, count in reasons.items()))
    for note in report.notes:
        click.echo(note)
    grid = Grid("segment", "requests", "verdict", "", box=box.SIMPLE, title="verdict")
    for one in report.segments:
        grid.add_row(one.name, str(one.baseline.requests), decision(one.verdict), "; ".join(one.verdict.reasons))
    console.print(grid)


def _segment(console: Console, segment: Segment) -> None:
    console.rule(f"{segment.name}: {decision(segment.verdict)}")
    for section in sections(segment):
        console.print(f"\n[bold]{section.title}[/bold]")
        for flag in section.flags:
            console.print(f"[bold red]! {flag}[/bold red]", highlight=False)
        for sentence in section.sentences:
            click.echo(sentence)
        for table in section.tables:
            grid = Grid(*table.head, box=box.SIMPLE, title=table.caption, title_justify="left")
            for row in table.rows:
                grid.add_row(*row)
            console.print(grid)
    console.print(f"[bold]verdict: {decision(segment.verdict)}[/bold]", highlight=False)
    for line in (*segment.verdict.reasons, *segment.verdict.warnings):
        click.echo(f"  {line}")
    for line in segment.would_change:
        click.echo(f"  would change it: {line}")
    click.echo("")
