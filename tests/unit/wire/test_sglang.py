"""SGLang's answers in the shapes of its 0.5.23 sources, and older ones where their keys differ."""

from __future__ import annotations

import json
from typing import Any

import pytest

from driftwatch.drift.live import counts
from driftwatch.wire import dialects, openai, sglang
from driftwatch.wire.exchange import Exchange, Skip
from driftwatch.wire.injection import Injected
from driftwatch.wire.strip import stripper

CHAIN = {
    "engine": "sglang",
    "version": "0.5.23",
    "speculative_eagle_topk": "1",
    "speculative_num_steps": "3",
    "speculative_num_draft_tokens": "4",
}
TREE = CHAIN | {"speculative_eagle_topk": "4", "speculative_num_steps": "5", "speculative_num_draft_tokens": "8"}
SPEC = {
    "spec_accept_rate": 5 / 12,
    "spec_accept_length": 10 / 4,
    "spec_num_correct_drafts": 5,
    "spec_num_proposed_drafts": 12,
    "spec_verify_ct": 4,
    "spec_correct_drafts_histogram": [1, 1, 2, 0],
}
META: dict[str, Any] = {
    "id": "rid-1",
    "finish_reason": {"type": "stop", "matched": 2},
    "prompt_tokens": 3,
    "completion_tokens": 10,
    "cached_tokens": 1,
    "weight_version": "default",
    "e2e_latency": 0.5,
}
GENERATE = {"text": "a b c", "sampling_params": {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 10}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
IDS = list(range(100, 110))


def exchange(path: str, request: object, answers: list[Any] | Any, **changes: Any) -> Exchange:
    if isinstance(answers, list):
        text = "".join(one if isinstance(one, str) else f"data: {json.dumps(one)}\n\n" for one in answers)
        body, kind = (text + "data: [DONE]\n\n").encode(), "text/event-stream"
    else:
        body, kind = json.dumps(answers).encode(), "application/json"
    values: dict[str, Any] = {
        "id": "r1",
        "path": path,
        "request": json.dumps(request).encode(),
        "status": 200,
        "headers": {"content-type": kind},
        "response": body,
        "deployment": CHAIN,
    }
    return Exchange(**values | changes)


def generated(cut: list[int], *, cumulative: bool, **meta: Any) -> list[Any]:
    """A stream of /generate whose chunks end behind so many tokens."""
    chunks = []
    for start, end in zip([0, *cut], cut, strict=False):
        first = 0 if cumulative else start
        last = end == cut[-1]
        info = META | {"completion_tokens": end, "finish_reason": META["finish_reason"] if last else None}
        text = "".join(f"t{i} " for i in range(first, end))
        chunks.append({"text": text, "output_ids": IDS[first:end], "meta_info": info | (SPEC | meta if last else {})})
    return chunks


@pytest.mark.parametrize("cumulative", [True, False])
@pytest.mark.parametrize("cut", [[10], [1, 4, 6, 10], [3, 4, 5, 8, 10]])
def test_a_generate_stream_whichever_way_it_repeats_itself(cumulative: bool, cut: list[int]) -> None:
    request = GENERATE | {"stream": True, "lora_path": "law", "session_id": "s"}
    answers = generated(cut, cumulative=cumulative)
    for answer in answers:
        answer["prompt_token_ids"] = [7, 8, 9]
    record = dialects.record(exchange("/generate", request, answers, ttft_s=0.1, e2e_s=1.0))
    assert (record.prompt_token_ids, record.output_token_ids) == ([7, 8, 9], IDS)
    assert record.output == "".join(f"t{i} " for i in range(10))
    assert (record.temperature, record.top_p, record.top_k) == (0.7, 0.9, None)
    assert (record.adapter, record.session, record.finish_reason, record.cached_tokens) == ("law", "s", "stop", 1)
    assert record.deployment["weight_version"] == "default"
    assert record.timing is not None
    assert record.timing.tpot_s == pytest.approx(0.1)
    assert record.engine is not None
    assert record.engine.model_dump(exclude_none=True) == {
        "windows": 4,
        "drafted": 12,
        "accepted": 5,
        "accepted_histogram": [1, 1, 2, 0],
        "gamma": 3,
    }


@pytest.mark.parametrize("ids", [True, False])
def test_a_model_that_repeats_itself_is_not_taken_for_a_stream_that_does(ids: bool) -> None:
    """Each chunk goes on behind the one before, and begins like it."""
    answers = [
        {"text": "ha", "output_ids": [5], "meta_info": META | {"completion_tokens": count, "finish_reason": finish}}
        for count, finish in ((1, None), (2, None), (3, {"type": "length"}))
    ]
    for answer in answers:
        answer["prompt_token_ids"] = [7, 8, 9]
        if not ids:
            del answer["output_ids"]
    record = sglang.record(exchange("/generate", GENERATE, answers))
    if ids:
        assert (record.output, record.output_token_ids) == ("hahaha", [5, 5, 5])
    else:
        assert not record.has_ids


@pytest.mark.parametrize("texts", [["", "a", "ab"], ["a", "ab", "ab"]])
def test_a_cumulative_stream_may_begin_without_a_token_or_end_without_one(texts: list[str]) -> None:
    answers = [
        {"text": text, "output_ids": [1, 2][: len(text)], "meta_info": META | {"completion_tokens": len(text)}}
        for text in texts
    ]
    record = sglang.record(exchange("/generate", GENERATE | {"input_ids": [7, 8, 9]}, answers))
    assert (record.output, record.output_token_ids) == ("ab", [1, 2])


def test_a_plain_generate_answer_with_ids_for_a_prompt() -> None:
    request = {"input_ids": [7, 8, 9], "sampling_params": {"temperature": 0}}
    record = sglang.record(exchange("/generate", request, {"text": "x", "output_ids": IDS, "meta_info": META}))
    assert (record.prompt_token_ids, record.output_token_ids, record.engine) == ([7, 8, 9], IDS, None)


def test_ids_that_are_not_whole_are_not_used() -> None:
    answer = {"text": "x", "output_ids": IDS[:-1], "meta_info": META}
    assert not sglang.record(exchange("/generate", GENERATE, answer)).has_ids


@pytest.mark.parametrize(
    ("request_", "answers", "reason"),
    [
        (GENERATE | {"text": ["a", "b"]}, {}, "list_prompt"),
        ({"input_ids": [[1], [2]]}, {}, "list_prompt"),
        (GENERATE | {"sampling_params": {"n": 2}}, {}, "several_choices"),
        (GENERATE | {"image_data": "http://x"}, {}, "unsupported"),
        (GENERATE, [{"text": "a", "output_ids": [1], "meta_info": META | {"finish_reason": None}}], "incomplete"),
        (GENERATE, {"text": "", "meta_info": META | {"finish_reason": {"type": "abort"}}}, "aborted"),
        (GENERATE, {"meta_info": META | {"finish_reason": {"type": "abort", "status_code": 503}}}, "engine_error"),
        (GENERATE, [{"error": {"message": "out of memory"}}], "engine_error"),
        (GENERATE, [{"text": "a", "output_ids": [1], "meta_info": META, "index": 1}], "several_choices"),
    ],
)
def test_what_gives_no_record(request_: dict[str, Any], answers: Any, reason: str) -> None:
    with pytest.raises(Skip) as skip:
        sglang.record(exchange("/generate", request_, answers))
    assert skip.value.reason == reason


NEW = {
    key: SPEC[key] for key in ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram")
}
OLD_NAMES = {
    "0.5.5": ("spec_accept_token_num", "spec_draft_token_num", None),
    "0.5.9": ("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram"),
    "0.5.12": ("spec_accepted_drafts", "spec_proposed_drafts", "spec_correct_drafts_histogram"),
}


@pytest.mark.parametrize("version", OLD_NAMES)
def test_every_generation_of_keys(version: str) -> None:
    meta: dict[str, Any] = {"spec_verify_ct": 4}
    meta |= {name: value for name, value in zip(OLD_NAMES[version], NEW.values(), strict=True) if name}
    found = sglang.figures(meta, CHAIN | {"version": version}, 10)
    assert found is not None
    assert (found["windows"], found["accepted"], found["drafted"], found["gamma"]) == (4, 5, 12, 3)
    assert found.get("accepted_histogram") == (None if version == "0.5.5" else [1, 1, 2, 0])


def test_the_prefill_token_is_none_of_a_window() -> None:
    """0.4.9 gave windows alone. Twelve tokens in four windows are a length of 2.75, not 3."""
    assert sglang.figures({"spec_verify_ct": 4}, {}, 12) == {"windows": 4, "accepted": 7}


@pytest.mark.parametrize("meta", [{}, {"spec_verify_ct": 0, "spec_accept_length": 0.0}, {"spec_accept_rate": 0.0}])
def test_an_engine_that_does_not_speculate_has_no_figures(meta: dict[str, Any]) -> None:
    assert sglang.figures(meta, CHAIN, 10) is None


def test_a_tree_has_a_length_and_depths_but_no_rate() -> None:
    meta = SPEC | {"spec_num_proposed_drafts": 28}
    expected = {"windows": 4, "accepted": 5, "accepted_histogram": [1, 1, 2, 0]}
    assert sglang.figures(meta, TREE, 10) == expected | {"gamma": 5}
    assert sglang.figures(meta, {}, 10) == expected, "unknown is not taken for a chain"


def test_a_tree_that_a_head_drafts_has_its_steps_as_proposals() -> None:
    """As in a replay of it: drafted and rejected are by depth, so 1 + 1 + 2 windows ended before the fifth."""
    facts = TREE | {"speculative_algorithm": "EAGLE3"}
    found = sglang.figures(SPEC | {"spec_num_proposed_drafts": 28}, facts, 10)
    assert found is not None
    assert (found["drafted"], found["gamma"]) == (20, 5)
    live = counts(found, 3)
    assert live is not None
    assert (live.metric, live.rejected, live.drafted) == ("hit_rate", 4, 20)
    lookup = sglang.figures(SPEC, TREE | {"speculative_algorithm": "NGRAM"}, 10)
    assert lookup is not None
    assert "drafted" not in lookup


def test_adaptive_steps_are_refused_with_the_reason() -> None:
    assert sglang.figures(SPEC, CHAIN | {"speculative_adaptive": "true"}, 10) == {"refused": "adaptive_steps"}


@pytest.mark.parametrize("key", ["single", "acc"])
def test_lossy_verification_is_refused_with_the_reason(key: str) -> None:
    facts = CHAIN | {f"speculative_accept_threshold_{key}": "0.9"}
    assert sglang.figures(SPEC, facts, 10) == {"refused": "lossy_verification"}
    assert sglang.figures(SPEC, CHAIN | {"verification": "lossy"}, 10) == {"refused": "lossy_verification"}
    exact = sglang.figures(SPEC, CHAIN | {f"speculative_accept_threshold_{key}": "1.0"}, 10)
    assert exact is not None
    assert exact["windows"] == 4


def test_a_histogram_that_counts_the_bonus_is_shifted_and_a_wrong_one_left_out() -> None:
    found = sglang.figures(SPEC | {"spec_correct_drafts_histogram": [0, 1, 1, 2]}, CHAIN)
    assert found is not None
    assert found["accepted_histogram"] == [1, 1, 2]
    assert "accepted_histogram" not in (sglang.figures(SPEC | {"spec_correct_drafts_histogram": [4]}, CHAIN) or {})


def test_ragged_windows_have_no_rate() -> None:
    found = sglang.figures(SPEC | {"spec_cap_lens_histogram": [0, 2, 2]}, CHAIN)
    assert found is not None
    assert "drafted" not in found


def chat_chunk(content: str | None, finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content, "reasoning_content": None}, "finish_reason": finish}
    return {"id": "rid-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice], "usage": None}


EXTENSIONS = {"spec_tokens_details": SPEC | {"spec_cap_lens_histogram": []}, "input_ids": [7, 8], "output_ids": [IDS]}
USAGE = {"prompt_tokens": 2, "completion_tokens": 10, "total_tokens": 12}


def chat_stream(extensions: dict[str, Any] | None) -> list[Any]:
    events: list[Any] = [chat_chunk("he"), chat_chunk("llo", "stop")]
    if extensions:
        events.append({**chat_chunk(None), "choices": [], "sglext": extensions})
    return [*events, {**chat_chunk(None), "choices": [], "usage": USAGE}]


def test_chat_ids_and_figures_come_in_sglext() -> None:
    record = dialects.record(exchange(openai.CHAT, CHAT | {"stream": True}, chat_stream(EXTENSIONS)))
    assert (record.prompt_token_ids, record.output_token_ids, record.output) == ([7, 8], IDS, "hello")
    assert record.engine is not None
    assert (record.engine.windows, record.engine.drafted, record.engine.accepted) == (4, 12, 5)
    framed = chat_stream({"spec_tokens_details": EXTENSIONS["spec_tokens_details"]})
    ids = {**chat_chunk(None), "choices": [], "sglext": {"input_ids": [7, 8], "output_ids": [IDS]}}
    framed.insert(3, f"event: sglext_ids\ndata: {json.dumps(ids)}\n\n")
    assert sglang.record(exchange(openai.CHAT, CHAT | {"stream": True}, framed)).output_token_ids == IDS


def test_a_plain_chat_answer_and_completion() -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
    answer = {"model": "m", "choices": [choice], "usage": USAGE, "sglext": EXTENSIONS}
    assert sglang.record(exchange(openai.CHAT, CHAT, answer)).output_token_ids == IDS
    choice = {"index": 0, "text": "x", "finish_reason": "length", "token_ids": IDS, "prompt_token_ids": [1, 2]}
    answer = {"model": "m", "choices": [choice], "usage": USAGE, "sglext": {"spec_tokens_details": SPEC}}
    record = sglang.record(exchange(openai.COMPLETIONS, {"prompt": "a"}, answer))
    assert (record.prompt_token_ids, record.output_token_ids) == ([1, 2], IDS)
    assert record.engine is not None
    choice["finish_reason"] = "abort"
    with pytest.raises(Skip, match="aborted"):
        sglang.record(exchange(openai.COMPLETIONS, {"prompt": "a"}, answer))


def inject(path: str, request: dict[str, Any], facts: dict[str, str] = CHAIN) -> Injected | None:
    return sglang.inject(path, json.dumps(request).encode(), facts)


def test_chat_is_asked_by_headers_and_figures_where_the_version_knows_them() -> None:
    headers = ((b"x-sglext-return-input-ids", b"1"), (b"x-sglext-return-output-ids", b"1"))
    new = inject(openai.CHAT, CHAT)
    assert new is not None
    assert json.loads(new.body) == CHAT | {"return_spec_tokens_details": True}
    assert new.headers == headers
    assert new.sglext == {"input_ids", "output_ids", "spec_tokens_details"}
    old = inject(openai.CHAT, CHAT, CHAIN | {"version": "0.5.16"})
    assert old is not None
    assert (json.loads(old.body), old.headers) == (CHAT, headers)
    assert old.sglext == {"input_ids", "output_ids"}
    asked = CHAT | {f"return_{key}_in_sglext": True for key in ("input_ids", "output_ids")}
    assert inject(openai.CHAT, asked, CHAIN | {"version": "0.5.16"}) is None
    given = inject(openai.CHAT, CHAT, CHAIN | {"return_output_ids": "true"})
    assert given is not None
    assert given.sglext == {"input_ids", "spec_tokens_details"}, "every client gets those: not to be stripped"


def test_other_routes_are_asked_in_their_bodies() -> None:
    completion = inject(openai.COMPLETIONS, {"prompt": "a"})
    assert completion is not None
    assert json.loads(completion.body)["return_token_ids"] is True
    assert completion.dropped == {"token_ids", "prompt_token_ids"}
    generate = inject("/generate", GENERATE)
    assert generate is not None
    assert json.loads(generate.body) == GENERATE | {"return_prompt_token_ids": True}
    assert inject("/generate", {"input_ids": [1]}) is None
    assert inject("/generate", GENERATE | {"text": ["a", "b"]}) is None
    assert inject("/v1/responses", {"input": "a"}) is None


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("kept", [{}, {"cached_tokens_details": {"device": 1}}])
def test_what_was_added_to_a_stream_is_taken_out_again(size: int, kept: dict[str, Any]) -> None:
    injected = inject(openai.CHAT, CHAT | {"stream": True})
    assert injected is not None
    asked = exchange(openai.CHAT, CHAT, chat_stream(EXTENSIONS | kept)).response
    wanted = exchange(openai.CHAT, CHAT, chat_stream(kept or None)).response
    strip = stripper(injected, "text/event-stream", bool)
    assert strip is not None
    pieces = [strip.feed(asked[i : i + size]) for i in range(0, len(asked), size)]
    got = b"".join([*pieces, strip.close()])
    assert [json.loads(line[6:]) for line in got.split(b"\n\n") if b"{" in line] == [
        json.loads(line[6:]) for line in wanted.split(b"\n\n") if b"{" in line
    ]
    assert got.endswith(b"data: [DONE]\n\n")


def test_what_was_added_to_plain_answers_is_taken_out_again() -> None:
    choice = {"index": 0, "text": "x", "finish_reason": "length"}
    for path, request, given in (
        (openai.COMPLETIONS, {"prompt": "a"}, {"choices": [choice], "usage": USAGE}),
        ("/generate", GENERATE, {"text": "x", "output_ids": IDS, "meta_info": META}),
    ):
        injected = inject(path, request)
        assert injected is not None
        answer = json.loads(json.dumps(given)) | {"prompt_token_ids": [1]}
        for one in answer.get("choices", []):
            one |= {"token_ids": IDS, "prompt_token_ids": [1]}
        if "choices" in answer:
            answer["sglext"] = {"spec_tokens_details": SPEC}
        strip = stripper(injected, "application/json", bool)
        assert strip is not None
        assert json.loads(strip.feed(json.dumps(answer).encode()) + strip.close()) == given
