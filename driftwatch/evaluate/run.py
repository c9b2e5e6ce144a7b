"""An evaluation from files to report: drafts replayed, prompts sent where there are engines, all of it put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from driftwatch.acceptance import DEFAULT_GAMMA, Rule
from driftwatch.economics.profile import Bound, CostProfile
from driftwatch.economics.shape import CHAIN
from driftwatch.economics.step import Timing
from driftwatch.errors import DriftwatchError, ProfileError
from driftwatch.evaluate.baseline import Conditions
from driftwatch.evaluate.candidate import Draft
from driftwatch.evaluate.engine import Limits, Prompt, failures, measure
from driftwatch.evaluate.report import Report, report
from driftwatch.evaluate.request import Clock, sums_of
from driftwatch.evaluate.sample import LOOKAHEAD, NGRAM, Progress, Sample
from driftwatch.settings import HiddenStates, Shadow
from driftwatch.shadow.lookahead.method import is_lookahead
from driftwatch.shadow.open import Opening, is_named
from driftwatch.shadow.profile.bound import misfits, shape_of
from driftwatch.shadow.target import Target
from driftwatch.shadow.tokenizer import Retokeniser


@dataclass(frozen=True)
class Subject:
    """What is evaluated, as the user named it."""

    files: Sequence[Path]
    by: Sequence[str] = ()
    draft: str | None = None
    target: Path | None = None
    profile: CostProfile | None = None
    rule: Rule = "argmax"
    engines: Sequence[str] = ()
    """URL of the plain one, then of the speculative one."""
    hidden_states: HiddenStates | None = None
    """An engine that runs the target for an EAGLE-3 draft, in place of this machine."""


def run(subject: Subject, at: Conditions, limits: Limits, shadow: Shadow, progress: Progress) -> Report:
    """Raises DriftwatchError with one line for what cannot be used: files, models, a profile of others, engines."""
    if subject.profile is not None:
        _refuse_others(subject, subject.profile)
    shape = CHAIN if subject.draft is None else shape_of(subject.draft)
    depths = max(DEFAULT_GAMMA, at.gamma, shape.steps)  # a tree's figures hold at its steps alone
    how = Opening.configured(shadow, subject.rule, depths=depths)
    target = tokenizer = None
    if subject.target is not None:
        target = Target.configured(subject.target, shadow, subject.hidden_states)
        tokenizer = Retokeniser(subject.target)
    sample = Sample(subject.files, subject.by, tokenizer)
    notes = _send(sample, subject.engines, limits, progress) if subject.engines else []
    costs, drafts, spec = subject.profile, [], subject.draft
    ngram, lookahead = NGRAM, LOOKAHEAD
    if spec is not None and is_lookahead(spec):
        if target is None or subject.hidden_states is not None:
            raise DriftwatchError(f"draft {spec}: the target itself is run; give it with --target")
        lookahead = spec
    elif spec is not None and is_named(spec):
        ngram = spec
    elif spec is not None:
        priced = costs if costs is None or costs.shape == shape else None
        if costs is not None and priced is None:
            notes.append(
                f"{spec}: acceptance alone, since it makes {shape.described} and the profile has the costs of "
                f"{costs.shape.described}; `driftwatch profile --draft {spec}` measures its own"
            )
        drafts.append(sample.trained(spec, how, target, priced, progress))
    drafts.append(sample.ngram(ngram, how, costs, progress))
    if target is not None and subject.hidden_states is None:
        tried = sample.lookahead(lookahead, target, costs, progress)
        drafts.append(tried)
        notes.append(f"{tried.name} was run and not replayed: the target decoded {tried.chosen} of the records again")
    if any(one.retokenised for one in sample.requests):
        notes.append("requests that came as text were tokenised again: their ids need not be the served ones")
    if costs is None and len(subject.engines) == 2:
        costs, drafts = _exported(sample, drafts, at, limits)
    return report(sample.requests, drafts, costs, at, skipped=sample.skipped, notes=notes)


def _send(sample: Sample, urls: Sequence[str], limits: Limits, progress: Progress) -> list[str]:
    prompts = [Prompt(place, record, tokens) for place, record, tokens in sample.share(limits.requests + 1)]
    warm = prompts.pop() if len(prompts) > limits.requests else None
    found = measure(urls, prompts, limits, lambda: progress("engines", len(prompts) * len(urls)), warm)
    notes = []
    for name, url, results in zip(("plain", "speculative"), urls, found, strict=False):
        for one in results:
            if one.clock is not None:
                sample.clocked(one.place, name, one.clock)
        kept = sum(one.clock is not None for one in results)
        reasons = "".join(f"; {reason}: {count}" for reason, count in failures(results).most_common(3))
        notes.append(f"{name}: {kept} of {len(results)} prompts timed at {url}, {limits.concurrency} at once{reasons}")
    return notes


def _exported(
    sample: Sample, drafts: Sequence[Draft], at: Conditions, limits: Limits
) -> tuple[CostProfile | None, list[Draft]]:
    """Costs at the engines' own batch and proposal length, from what they took and what the trained draft's replay says
    of the same requests; for other batches and lengths they say nothing. Without a trained draft there are none."""
    name = drafts[0].name
    pairs = [one for one in sample.requests if one.plain and one.speculative and name in one.tallies]
    sums = sums_of(pairs, name)
    if drafts[0].kind != "trained" or sums is None:
        return None, list(drafts)
    steps = sums.interval("steps_per_token", at.gamma).value
    if steps is None:
        return None, list(drafts)
    context = fmean(one.context for one in pairs)
    plain, fast = (
        _token_s([clock for one in pairs if (clock := getattr(one, mode)) is not None])
        for mode in ("plain", "speculative")
    )
    batch = float(limits.concurrency)
    points = [
        Timing.exported(batch=batch, gamma=0, token_seconds=plain, context=context, repeats=len(pairs)),
        Timing.exported(
            batch=batch, gamma=at.gamma, token_seconds=fast, length=1.0 / steps, context=context, repeats=len(pairs)
        ),
    ]
    profile = CostProfile.fitted(Bound("engine", "", ""), points, "engine")
    return profile, [Draft(drafts[0].name, "trained", profile), *drafts[1:]]


def _token_s(clocks: Sequence[Clock]) -> float:
    return sum(clock.decode_s for clock in clocks) / sum(clock.tokens for clock in clocks)


def _refuse_others(subject: Subject, profile: CostProfile) -> None:
    """A profile holds for one target and draft. Raises ProfileError if these are others, or if it has no draft."""
    if subject.draft is not None and not is_named(subject.draft) and profile.draft is None:
        raise ProfileError(
            f"the cost profile has no draft; measure it with `driftwatch profile --draft {subject.draft}`"
        )
    here = subject.target if subject.hidden_states is None else None  # else its weights are not
    if mine := misfits(profile, subject.draft, here):
        raise ProfileError(f"the cost profile is not of {' and '.join(mine)}; measure one with `driftwatch profile`")
