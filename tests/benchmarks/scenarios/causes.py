"""What each scenario comes out as: events, their delay, and the cause named."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np

from driftwatch.control.causes import SETTLE
from tests.benchmarks.scenarios.measure import BASE, Figures, delay_of, lower
from tests.benchmarks.scenarios.panel import Event, Panel
from tests.benchmarks.scenarios.traffic import Shape, requests


@dataclass(frozen=True)
class Scenario:
    """What follows on the stable traffic: periods of shapes; the cause that is true, None where nothing is wrong."""

    cause: str | None
    periods: tuple[tuple[Shape, int], ...]
    acceptance_alarm: bool = True
    """Whether an alarm of a cell may come."""
    learnt: Shape = BASE
    to_the_end: bool = False
    live_alone: bool = False


def _facts(**changes: str) -> dict[str, str]:
    return BASE.facts | changes


REST = 2500
SLOPED = replace(BASE, length_slope=0.04)
SCENARIOS: dict[str, Scenario] = {
    "stable": Scenario(None, ((BASE, REST),), False),
    "mix shift": Scenario("traffic", ((replace(BASE, off_share=0.4), REST),), False),
    "mix shift, looked at longer": Scenario(
        "traffic", ((replace(BASE, off_share=0.4), 10_000),), False, to_the_end=True
    ),
    "fall .02": Scenario(None, ((lower(BASE, 0.02), REST),), False),
    "fall .05": Scenario("concept", ((lower(BASE, 0.05), REST),)),
    "fall .10": Scenario("concept", ((lower(BASE, 0.10), REST),)),
    "fall .20": Scenario("concept", ((lower(BASE, 0.20), REST),)),
    "ramp to .20": Scenario("concept", tuple((lower(BASE, 0.01 * k), 200) for k in range(1, 21))),
    "target swapped": Scenario(
        "target", ((replace(lower(BASE, 0.10), surprise=0.75, facts=_facts(target="t2")), REST),), False
    ),
    "target swapped in silence": Scenario("target", ((replace(lower(BASE, 0.10), surprise=0.75), REST),)),
    "draft swapped": Scenario("draft", ((replace(lower(BASE, 0.10), facts=_facts(draft="d2")), REST),), False),
    "engine fault": Scenario("engine", ((replace(BASE, engine_loss=0.15), REST),), False),
    "engine fault, upgraded": Scenario(
        "engine", ((replace(BASE, engine_loss=0.15, facts=_facts(engine="e2")), REST),), False
    ),
    "engine fault, no replay": Scenario("engine", ((replace(BASE, engine_loss=0.15), REST),), live_alone=True),
    "engine fault, no replay, upgraded": Scenario(
        "engine", ((replace(BASE, engine_loss=0.15, facts=_facts(engine="e2")), REST),), False, live_alone=True
    ),
    "load": Scenario("load", ((replace(BASE, batch=32.0), REST),), False),
    "label churn": Scenario(None, ((replace(BASE, tenants=(("c", 0.5, 0.0), ("d", 0.5, -0.05))), REST),), False),
    "shorter requests": Scenario(None, ((replace(BASE, median_tokens=25.0), REST),), False),
    "shorter requests, short ones harder": Scenario(
        None, ((replace(SLOPED, median_tokens=25.0), REST),), False, SLOPED
    ),
    "recovered": Scenario("concept", ((lower(BASE, 0.15), 1500), (BASE, 6000)), to_the_end=True),
}
LEARNING = 8000


_panels: dict[tuple[int, bool, int], Panel] = {}


def cause(name: str, runs: int, seed: int) -> Figures:
    """One scenario so often, ten runs on each separately learnt baseline."""
    scenario = SCENARIOS[name]
    outcomes = []
    early = 0
    for run in range(runs):
        panel = copy.deepcopy(_learnt(scenario, seed * 1000 + run // 10))
        before = len(panel.events)
        early += before
        rng, first = np.random.default_rng([seed, run, *name.encode()]), LEARNING
        for shape, count in scenario.periods:
            for one in requests(rng, shape, count, first=first, live=True):
                panel.take(one)
                if not scenario.to_the_end and _done(panel, one.at):
                    break
            first += count
        outcomes.append(panel.events[before:])
    return _summary(scenario, outcomes) | {"events while learning": early}


def _done(panel: Panel, at: int) -> bool:
    """The first event is named, and what comes with it had its time."""
    first = next(iter(panel.events), None)
    settled = first is not None and first.settled not in (None, "unknown")
    regressed = first is not None and first.kind == "deployment_regressed"
    return first is not None and (settled or regressed) and at >= first.index + 2 * SETTLE


def _named(event: Event) -> str:
    """The cause when training would be asked for, or as far as it was seen."""
    return event.settled or event.cause or "none"


def _learnt(scenario: Scenario, seed: int) -> Panel:
    key = id(scenario.learnt), scenario.live_alone, seed  # a shape holds a dict and has no hash
    if key not in _panels:
        panel = _panels[key] = Panel(scenario.live_alone)
        for one in requests(np.random.default_rng(seed), scenario.learnt, LEARNING, live=True):
            panel.take(one)
    return _panels[key]


def _summary(scenario: Scenario, outcomes: list[list[Event]]) -> Figures:
    first = [events[0] for events in outcomes if events]
    said = [_named(event) for event in first]
    right = sum(cause == scenario.cause for cause in said)
    unknown = sum(cause in ("unknown", "none") for cause in said)
    cells = [sum(event.kind == "drift" for event in events) for events in outcomes]
    off = sum(any(event.kind == "drift" and event.split == "off" for event in events) for events in outcomes)
    return {
        "runs": len(outcomes),
        "cause": scenario.cause,
        "no event": len(outcomes) - len(first),
        "right": right,
        "unknown": unknown,
        "wrong": len(first) - right - unknown,
        "named": {cause: said.count(cause) for cause in sorted(set(said))},
        "delay": delay_of([event.index - LEARNING + 1 for event in first]),
        "acceptance alarms, runs with": sum(count > 0 for count in cells),
        "of those in a cell off": off,
        "acceptance alarms a run": round(float(np.mean(cells)), 2),
        "closed": sum(all(event.closed_index for event in events) for events in outcomes if events),
    }
