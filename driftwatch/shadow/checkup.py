"""What `driftwatch doctor` says of one draft: what it is, what was inferred, and whether it works on its target."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

from driftwatch.acceptance import Rule
from driftwatch.errors import ModelError
from driftwatch.records import read_records
from driftwatch.settings import Model, Shadow
from driftwatch.shadow.block.readings import described
from driftwatch.shadow.block.replay import BlockDraft
from driftwatch.shadow.chain import ChainDraft
from driftwatch.shadow.draft import Draft, Tokens
from driftwatch.shadow.eagle3.checkpoint import Checkpoint
from driftwatch.shadow.eagle3.readings import embedding_rows_apart
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.open import Opening, is_named
from driftwatch.shadow.selftest import Fit, own_text, self_test
from driftwatch.shadow.states.engine import EngineStates
from driftwatch.shadow.target import NoTargetError, Target
from driftwatch.shadow.tokenizer import Retokeniser
from driftwatch.shadow.worker import load_draft

Line = tuple[Literal["ok", "warning", "problem"], str]

RECORDS = 64
"""Records that a draft is tried on at most."""
LOW = 0.2
"""Share of first proposals accepted on the target's own greedy text under which a trained draft is suspect."""


def checkup(
    shadow: Shadow,
    spec: str,
    target_path: Path | None,
    tokenizer_path: Path | None,
    records: Path | None,
    served: Model | None = None,
) -> Iterator[Line]:
    """Lines in the order of what can be known. ``served`` is the settings' entry that names the draft: its rule and the
    engine that gives hidden states, if any. Raises DriftwatchError where the draft cannot be loaded at all."""
    tokenizer = Retokeniser(tokenizer_path) if tokenizer_path else None
    rule: Rule = served.rule if served else "argmax"
    engine = served.hidden_states if served else None
    target = Target.configured(target_path, shadow, engine) if target_path is not None else None
    opening = Opening.configured(shadow)
    try:
        draft = load_draft(spec, tokenizer, opening, target)
    except NoTargetError as error:
        yield "warning", f"live figures only: {error}"
        return
    found = draft.fingerprint
    size = f"{found.parameters:,} parameters, {found.vocabulary:,} token ids, " if found.parameters else ""
    yield "ok", f"{found.kind} draft, {size}sha256 {found.sha256[:12]}, on {opening.device}"
    if rule == "rejection" and not is_named(spec) and (target is None or engine is not None):
        yield "warning", "live figures only: the rejection rule needs the target's probabilities; tried under argmax"
    if isinstance(draft, ChainDraft):
        yield "ok", draft.described
    if isinstance(draft, Eagle3Draft) and target is not None:
        yield from _eagle3(draft, target)
    if isinstance(draft, BlockDraft) and target is not None:
        yield "ok", described(draft, target.states().layers)
        yield from (("ok", f"inferred: {note}") for note in draft.checkpoint.inferred)
        yield from (("ok", f"ignored: {name}") for name in draft.checkpoint.ignored)
    if target is None or is_named(spec):
        return
    if engine is not None and records is None:
        yield "warning", "not tried out: an engine runs the target, so give --records with requests that it served"
        return
    try:
        samples = _recorded(records) if records else own_text(target, tokenizer)
    except ModelError as error:
        yield "warning", f"not tried out, since the target cannot be loaded: {error}"
        return
    yield from _verdict(
        draft, self_test(draft, target, samples, batch_tokens=shadow.batch_tokens), "records" if records else None
    )


def _recorded(path: Path) -> list[Tokens]:
    found = (record for record in read_records([path]) if record.prompt_token_ids and record.output_token_ids)
    return [Tokens(one.prompt_token_ids or (), one.output_token_ids or ()) for one in islice(found, RECORDS)]


def _eagle3(draft: Eagle3Draft, target: Target) -> Iterator[Line]:
    checkpoint, states = draft.checkpoint, target.states()
    yield "ok", _described(checkpoint, draft.layers, states.layers)
    for note in checkpoint.inferred:
        yield "ok", f"inferred: {note}"
    for name in checkpoint.ignored:
        yield "ok", f"ignored: {name}"
    for warning in checkpoint.warnings:
        yield "warning", warning
    if isinstance(states, EngineStates):
        states.probe()
        yield "ok", f"{states.url} gives hidden_states {list(states.gives)}"
        return
    apart = embedding_rows_apart(checkpoint, target.model())
    if apart and checkpoint.spec.origin != "speculators":  # which trains it
        yield (
            "warning",
            f"its embed_tokens.weight differs from the target's in {apart:,} rows: it was exported with the embedding "
            "of another revision of the target",
        )


def _described(checkpoint: Checkpoint, layers: tuple[int, ...], target_layers: int) -> str:
    spec = checkpoint.spec
    flags = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "qk_norm")
    named = [flag for flag in flags if getattr(spec, flag)] + ([] if spec.last_norm else ["no last norm"])
    scaling = f" ({spec.rope.scaling['rope_type']})" if spec.rope.scaling else ""
    return (
        f"from {spec.origin}: hidden {spec.hidden}, {spec.heads} heads of {spec.head_dim}, {spec.kv_heads} kv heads; "
        f"reads hidden_states {list(layers)} of {target_layers} layers; {spec.vocabulary:,} of "
        f"{spec.target_vocabulary:,} token ids; rope_theta {spec.rope.theta:g}{scaling}; embedding: {spec.embedding}, "
        f"head: {spec.head}; flags: {', '.join(named) or 'none'}"
    )


def _verdict(draft: Draft, fit: Fit, source: str | None) -> Iterator[Line]:
    where = f"{fit.tokens:,} tokens of {source or 'text that the target wrote'}"
    figures = f"{fit.hits:.3f} of its first proposals accepted on {where} (always the commonest: {fit.chance:.3f})"
    if fit.tokens == 0:
        yield "warning", "not tried out: no sample has two output tokens"
    elif not fit.works:
        yield "problem", f"no better than chance: {figures}"
    else:
        yield ("ok" if fit.hits >= LOW else "warning"), figures
    if fit.better is not None:
        reading, score, loaded, errors = fit.better
        yield (
            "problem",
            f"read otherwise ({reading.name}) it fits better, sum min(p, q) {score:.3f} against {loaded:.3f}, "
            f"{errors:.1f} standard errors: {reading.cause}",
        )
