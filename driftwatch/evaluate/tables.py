"""The sections of a report as tables and sentences, the same for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from driftwatch.economics.price import Price
from driftwatch.economics.range import Range
from driftwatch.economics.sizing import Room
from driftwatch.economics.tail import QUANTILES
from driftwatch.evaluate.baseline import Percentiles
from driftwatch.evaluate.candidate import Candidate
from driftwatch.evaluate.report import Segment
from driftwatch.evaluate.wallclock import WallClock
from driftwatch.evaluate.words import NO_DATA, SOURCES, limits, number, prefill


@dataclass(frozen=True)
class Table:
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    title: str
    sentences: Sequence[str]
    tables: Sequence[Table]
    flags: Sequence[str] = ()
    """What a reader must not miss."""


def sections(segment: Segment) -> list[Section]:
    return [_baseline(segment), _acceptance(segment), _wall_clock(segment), _cost(segment)]


def _baseline(segment: Segment) -> Section:
    base, tables = segment.baseline, []
    said = [
        f"{base.requests} requests, {base.tokens:,} decoded tokens, {base.context:,.0f} tokens of context on average"
    ]
    rows = [
        (name, *(limits(found[q], "s") for q in QUANTILES))
        for name, found in (
            ("time per output token", base.per_token),
            ("decoding, per request", base.per_request),
            ("time to first token", base.ttft),
            ("time per output token, as recorded", base.recorded),
        )
        if found
    ]
    if rows:
        tables.append(Table("the target alone", ("", "p50", "p95", "p99"), rows))
    if base.source is None:
        said.append("what a step costs is unknown: give --profile, or the URLs of engines")
    elif base.batch is None:
        said.append("at this rate the target alone saturates: the queue grows without bound")
    else:
        said.append(f"{SOURCES[base.source]}, at a batch of {base.batch:.3g}")
    if base.per_million is not None:
        said.append(f"{number(base.per_million)} per million output tokens, for decoding")
    said.append(prefill(base))
    if segment.room is not None:
        said.append(
            f"with every proposal accepted, a request would be {segment.room.ceiling:.2f} times as fast at best"
        )
        if segment.subject is None or segment.subject.draft.kind != "trained":
            tables.append(_needs(segment.room))
    return Section("1. The target alone", said, tables)


def _needs(room: Room) -> Table:
    rows = [
        (
            str(need.gamma),
            number(need.break_even),
            "none is enough" if need.hit_rate is None else number(need.hit_rate),
            "none is enough" if need.hit_rate_for_gain is None else number(need.hit_rate_for_gain),
            number(need.ceiling),
        )
        for need in room.needs
    ]
    head = ("gamma", "break-even length", "hit rate to break even", "for 10% end to end", "most it could give")
    return Table(f"what a draft would need at a batch of {room.batch:g}, costs {room.costs}", head, rows)


def _acceptance(segment: Segment) -> Section:
    said = []
    flags = [f"STOP, {one.draft.name}: {one.stop}" for one in segment.candidates if one.stop is not None]
    if segment.untrained is not None:
        flags.append(segment.untrained)
    if not segment.candidates:
        said.append("no draft was judged")
    return Section("2. Acceptance", said, [_figures(one) for one in segment.candidates], flags)


def _figures(one: Candidate) -> Table:
    how = "run" if one.draft.kind == "lookahead" else "replayed"
    values = {value.gamma: value for value in one.values}
    rows = []
    for gamma, figures in one.figures.items():
        value = values.get(gamma)
        counted = [limits(Range.of(figures[name])) for name in ("acceptance_length", "hit_rate", "acceptance_rate")]
        worth = (NO_DATA, NO_DATA)
        if value is not None:
            # Lookahead is counted by steps: its windows are not all that costs.
            counted[0] = limits(value.length)
            worth = (number(value.break_even), limits(value.judged) + ("*" if value.outside else ""))
        rows.append((str(gamma), counted[0], worth[0], *counted[1:], worth[1]))
    head = ("gamma", "acceptance length", "break-even", "hit rate", "acceptance rate", "speedup of decoding")
    star = "; * outside what was measured" if any(value.outside for value in one.values) else ""
    return Table(f"{one.draft.name}, {how} on {one.requests} requests{star}", head, rows)


def _wall_clock(segment: Segment) -> Section:
    wall = segment.wall
    if wall is None:
        return Section("3. Time with speculation", ["nothing to compare: costs or acceptance are unknown"], [])
    said = [f"{SOURCES[wall.source]}: {segment.about}, gamma {wall.gamma}, {wall.requests} requests"]
    said.append(f"decoding of these requests is {limits(wall.speedup)} times as fast")
    if wall.source == "predicted":
        said.append(
            "that counts what their last windows propose behind the end, which the speedups of section 2 do not"
        )
    if wall.end_to_end.value is not None:
        said.append(f"whole requests are {limits(wall.end_to_end)} times as fast")
    said.append(f"{limits(wall.slower, '%')} of requests get slower")
    flags = []
    if wall.p99 == "worse":
        flags.append(f"p99 gets worse: {limits(wall.relative[0.99])} times the time per token of plain decoding")
    elif wall.p99 == "undecided":
        said.append("whether p99 gets better or worse is open: about 370 requests are needed for its limits")
    return Section("3. Time with speculation", said, [_percentiles(wall)], flags)


def _percentiles(wall: WallClock) -> Table:
    def row(name: str, found: Percentiles, unit: str) -> Iterator[tuple[str, ...]]:
        if found:
            yield (name, *(limits(found[q], unit) for q in QUANTILES))

    rows = [
        *row("time per output token, plain", wall.plain, "s"),
        *row("time per output token, speculative", wall.speculative, "s"),
        *row("same request, speculative / plain", wall.relative, ""),
        *row("time to first token, plain", wall.plain_ttft, "s"),
        *row("time to first token, speculative", wall.speculative_ttft, "s"),
    ]
    return Table("over requests", ("", "p50", "p95", "p99"), rows)


def _cost(segment: Segment) -> Section:
    title, found = "4. Cost", segment.price
    if found is None:
        return Section(title, ["no price: give --price-per-gpu-hour, and costs of a step"], [])
    measured = segment.wall is not None and segment.wall.source == "measured"
    said = [f"{SOURCES['measured' if measured else 'predicted']}: {segment.about}"]
    said.append(f"same GPUs: speculation saves {limits(found.saved, '%')} of the cost of a token")
    if measured:
        said.append("what plain decoding costs at that latency was not measured: it takes a cost profile")
        return Section(title, said, [_prices(found, added=False)])
    if found.replicas is None:
        said.append("no number of GPUs gives plain decoding this latency")
    else:
        said.append(f"plain decoding at the same latency takes {found.replicas:.2f} times the GPUs")
    return Section(title, said, [_prices(found, added=True)])


def _prices(found: Price, *, added: bool) -> Table:
    rows = [
        ("plain", number(found.plain), f"{found.plain_batch:.3g}"),
        ("speculative, same GPUs", limits(found.speculative), f"{found.batch:.3g}"),
    ]
    if added:
        cost = "out of reach" if found.added is None else number(found.added)
        rows.append(("plain, GPUs added for the same latency", cost, ""))
    return Table(f"per million output tokens, costs {found.costs}", ("", "cost", "running"), rows)
