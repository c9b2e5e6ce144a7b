"""SGLang's dialect: native ``/generate``, and the OpenAI routes with ``sglext``.

As SGLang 0.5.23 does it (older key names in ``NAMES``):
- ``/generate`` always gives ``output_ids`` and ``meta_info``. A stream repeats everything with each chunk, unless the
  server runs with ``--incremental-streaming-output``: the token count beside the ids tells the two apart;
- chat gives ids in ``sglext`` when a header asks for them (``x-sglext-return-*-ids``); ``return_token_ids`` would be
  refused there on a stream. Completions take ``return_token_ids``;
- ``return_spec_tokens_details`` puts a request's figures into ``sglext``: in an event of its own, before the usage.

What the figures mean: ``spec_verify_ct`` are windows, ``correct`` drafts are accepted without bonus.
``spec_accept_length`` counts the prefill token and is not used. ``proposed`` is windows x (N - 1) with the static N:
true of chains, not of trees (where N counts nodes), ragged verification or adaptive steps. A tree's windows have their
steps as proposals (driftwatch.acceptance), so its rate is accepted / (verify calls x steps).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import orjson

from driftwatch.records import Record
from driftwatch.wire import openai
from driftwatch.wire.exchange import Exchange, Skip
from driftwatch.wire.injection import Injected

GENERATE = "/generate"
ROUTES = openai.ROUTES | {GENERATE}

NAMES = {
    "accepted": ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num"),
    "drafted": ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num"),
    "histogram": ("spec_correct_drafts_histogram", "spec_accept_histogram"),
}
"""Our words, and SGLang's from the newest to the oldest: 0.5.12 renamed them and kept aliases until after 0.5.16."""

TREES = ("EAGLE", "EAGLE3", "NEXTN")
"""Algorithms that draft trees with a topk above 1, of as many depths as they make steps."""
SPEC_DETAILS_SINCE = (0, 5, 17)
IDS_HEADERS = {"input_ids": b"x-sglext-return-input-ids", "output_ids": b"x-sglext-return-output-ids"}

LOSSY = "lossy"

Json = dict[str, Any]


def record(exchange: Exchange) -> Record:
    """The record of an exchange, with ids and figures where SGLang gave them. Raises Skip."""
    if exchange.path == GENERATE:
        return _generate(exchange)
    parsed = openai.parse(exchange)
    if openai.is_multimodal(parsed):
        raise Skip("unsupported")
    values = openai.fields(parsed)
    extensions: Json = {}
    for answer in parsed.answers:
        extensions |= answer["sglext"] if isinstance(answer.get("sglext"), dict) else {}
    ids = openai.whole_ids(parsed, extensions.get("input_ids"), _first(extensions.get("output_ids")))
    if ids is not None:
        values |= {"prompt_token_ids": ids[0], "output_token_ids": ids[1]}
        values["timing"] = openai.timing(exchange, len(ids[1]))
    elif not openai.text_suffices(parsed):
        raise Skip("unsupported")
    details = extensions.get("spec_tokens_details")
    if isinstance(details, dict):
        tokens = len(ids[1]) if ids else parsed.usage.get("completion_tokens")
        values["engine"] = figures(details, exchange.deployment, tokens)
    values["adapter"] = _text(parsed.request.get("lora_path"))
    values["rid"] = next((answer["id"] for answer in parsed.answers if answer.get("id")), None)
    return openai.build(values)


def inject(path: str, body: bytes, facts: Mapping[str, str]) -> Injected | None:
    """Ask for ids and figures, as the engine's version knows them. None if there is nothing to add."""
    if path not in ROUTES:
        return None
    try:
        request = orjson.loads(body)
        if not isinstance(request, dict):
            return None
        (_check_generate if path == GENERATE else _check_openai(path))(request)
    except (orjson.JSONDecodeError, Skip):
        return None
    if path == GENERATE:
        if "input_ids" in request or request.get("return_prompt_token_ids"):
            return None
        return Injected(
            orjson.dumps(request | {"return_prompt_token_ids": True}),
            ids=False,
            usage=False,
            dropped=frozenset({"prompt_token_ids"}),
        )
    added: Json = {}
    headers: list[tuple[bytes, bytes]] = []
    keys: set[str] = set()
    dropped: frozenset[str] = frozenset()
    if path == openai.CHAT:
        # --return-input-ids and --return-output-ids give them to every client.
        wanted = [
            key
            for key in IDS_HEADERS
            if not request.get(f"return_{key}_in_sglext") and facts.get(f"return_{key}") != "true"
        ]
        headers = [(IDS_HEADERS[key], b"1") for key in wanted]
        keys |= set(wanted)
    elif not request.get("return_token_ids"):
        added["return_token_ids"] = True
        dropped = frozenset({"prompt_token_ids", "token_ids"})
    if version_of(facts) >= SPEC_DETAILS_SINCE and not request.get("return_spec_tokens_details"):
        added["return_spec_tokens_details"] = True
        keys.add("spec_tokens_details")
    if not added and not headers:
        return None
    new = orjson.dumps(request | added) if added else body
    return Injected(new, ids=False, usage=False, headers=tuple(headers), sglext=frozenset(keys), dropped=dropped)


def verification(facts: Mapping[str, str]) -> dict[str, str]:
    """How drafts are verified, as a fact, where that is not lossless verification token by token.

    Thresholds below 1 accept tokens that the target would not have sampled; they can be changed while it runs.
    """
    for key in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        try:
            if float(facts.get(key, "1")) != 1.0:
                return {"verification": LOSSY}
        except ValueError:
            continue
    return {"verification": "block"} if facts.get("speculative_use_block_verification") == "true" else {}


def figures(meta: Json, facts: Mapping[str, str], tokens: object = None) -> Json | None:
    """What the engine counted, in the words of the acceptance definitions; None where it did not speculate.

    ``refused`` in place of figures says why those that there are mean something else.
    """
    windows = meta.get("spec_verify_ct")
    if type(windows) is not int or windows <= 0:
        return None
    if facts.get("verification") == LOSSY or verification(facts).get("verification") == LOSSY:
        return {"refused": "lossy_verification"}
    if facts.get("speculative_adaptive") == "true":
        # Steps without a draft count as verified ones with nothing accepted: load would read as drift.
        return {"refused": "adaptive_steps"}
    accepted, drafted, histogram = (_renamed(meta, name) for name in ("accepted", "drafted", "histogram"))
    if type(accepted) is not int:
        # 0.4.9 gave the number of windows alone; the prefill token is none of theirs.
        if type(tokens) is not int or tokens - 1 < windows:
            return None
        return {"windows": windows, "accepted": tokens - 1 - windows}
    found: Json = {"windows": windows, "accepted": accepted}
    if (bins := _histogram(histogram, windows, accepted)) is not None:
        found["accepted_histogram"] = bins
    steps = facts.get("speculative_num_steps", "")
    chain = facts.get("speculative_eagle_topk") == "1" or facts.get("speculative_algorithm") == "DFLASH"
    if chain and type(drafted) is int and not meta.get("spec_cap_lens_histogram"):
        found |= {"drafted": drafted, "gamma": drafted // windows}
    elif steps.isdecimal() and int(steps) > 0:
        found["gamma"] = int(steps)
        topk = facts.get("speculative_eagle_topk", "")
        if facts.get("speculative_algorithm") in TREES and topk.isdecimal() and int(topk) > 1:
            found["drafted"] = int(steps) * windows
    return found


def _histogram(bins: Any, windows: int, accepted: int) -> list[int] | None:
    """Windows by accepted drafts. Counted with the bonus, as some versions did, all bins lie one further up."""
    if not isinstance(bins, list) or not all(type(n) is int and n >= 0 for n in bins) or sum(bins) != windows:
        return None
    total = sum(j * n for j, n in enumerate(bins))
    if total == accepted + windows and accepted != total:
        return bins[1:]
    return bins if total == accepted else None


def version_of(facts: Mapping[str, str]) -> tuple[int, ...]:
    """``0.5.12.post1`` as (0, 5, 12); () where unknown, which is older than any."""
    numbers = []
    for part in facts.get("version", "").lstrip("v").split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _generate(exchange: Exchange) -> Record:
    request, answers = openai.read(exchange)
    _check_generate(request)
    if any(answer.get("index") not in (0, None) for answer in answers):
        raise Skip("several_choices")
    metas = [answer["meta_info"] for answer in answers if isinstance(answer.get("meta_info"), dict)]
    finish = metas[-1].get("finish_reason") if metas else None
    if not isinstance(finish, dict) or not finish.get("type"):
        raise Skip("incomplete")
    if finish["type"] == "abort":
        raise Skip("engine_error" if finish.get("status_code") else "aborted")
    meta, sampling = metas[-1], request.get("sampling_params") or {}
    tokens = meta.get("completion_tokens")
    prompt = request.get("input_ids") or next(
        (a["prompt_token_ids"] for a in answers if a.get("prompt_token_ids")), None
    )
    output = [answer["output_ids"] for answer in answers if isinstance(answer.get("output_ids"), list)]
    texts = [text for answer in answers if isinstance(text := answer.get("text"), str)]
    cumulative = _cumulative(answers, texts)
    ids = output[-1] if output and cumulative else [token for chunk in output for token in chunk]
    deployment = dict(exchange.deployment)
    if isinstance(meta.get("weight_version"), str):
        deployment["weight_version"] = meta["weight_version"]
    values: Json = {
        "id": exchange.id,
        "prompt": request.get("text"),
        "output": texts[-1] if texts and cumulative else "".join(texts),
        **{key: sampling.get(key) for key in ("temperature", "top_p", "top_k")},
        "labels": dict(exchange.labels),
        "ts": exchange.started_at,
        "session": exchange.session or _text(request.get("session_id")),
        "adapter": _text(request.get("lora_path")),
        "finish_reason": finish["type"],
        "cached_tokens": meta.get("cached_tokens"),
        "timing": openai.timing(exchange, tokens),
        "engine": figures(meta, exchange.deployment, tokens),
        "deployment": deployment,
        "rid": meta.get("id"),  # the engine's own name for the request: X-Request-Id is not it
        "usage": {"completion_tokens": tokens, "prompt_tokens": meta.get("prompt_tokens")},
    }
    if not isinstance(prompt, list) or meta.get("prompt_tokens", len(prompt)) != len(prompt):
        prompt = None  # a log that cut it short
    if prompt and ids and len(ids) == tokens:
        values |= {"prompt_token_ids": prompt, "output_token_ids": ids}
    elif not isinstance(values["prompt"], str):
        raise Skip("unsupported")
    return openai.build(values)


def _cumulative(answers: list[Json], texts: list[str]) -> bool:
    """Whether each chunk repeats the ones before, as is the default, or goes on behind them.

    Each counts the tokens so far: one that holds fewer ids goes on. Text tells nothing of that (a model that repeats
    itself gives chunks of which each begins like the one before), so it is asked only where there are no ids.
    """
    sizes = [
        (len(ids), count)
        for answer in answers
        if isinstance(ids := answer.get("output_ids"), list)
        and isinstance(meta := answer.get("meta_info"), dict)
        and type(count := meta.get("completion_tokens")) is int
    ]
    if sizes:
        later = [ids == count for (_, before), (ids, count) in pairwise(sizes) if before]
        return any(later) or not later
    return all(later.startswith(text) for text, later in pairwise(texts))


def _check_openai(path: str) -> Any:
    return lambda request: openai.check_request(path, request)


def _check_generate(request: Json) -> None:
    text, ids, sampling = request.get("text"), request.get("input_ids"), request.get("sampling_params")
    if isinstance(text, list) or (isinstance(ids, list) and any(isinstance(one, list) for one in ids)):
        raise Skip("list_prompt")
    if isinstance(sampling, list):
        raise Skip("list_prompt")
    if isinstance(sampling, dict) and sampling.get("n") not in (None, 1):
        raise Skip("several_choices")
    if request.get("input_embeds") or any(request.get(f"{kind}_data") for kind in ("image", "video", "audio")):
        raise Skip("unsupported")


def _renamed(meta: Json, name: str) -> Any:
    return next((meta[key] for key in NAMES[name] if meta.get(key) is not None), None)


def _first(lists: object) -> object:
    return lists[0] if isinstance(lists, list) and len(lists) == 1 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
