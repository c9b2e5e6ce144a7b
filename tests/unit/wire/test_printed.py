"""Request logs as SGLang 0.5.23 and vLLM print them, between other lines.

The lines are made as the engines make them: SGLang writes ``repr`` of each value and cuts what is longer than its level
allows, vLLM formats with ``%r`` and ``%s`` (its ``entrypoints/logger.py``); around them is what servers print.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.cli.ingest import read
from driftwatch.errors import RecordError
from driftwatch.records import Record
from driftwatch.wire.printed import Reader

from .test_logs import IDS, META, OUT

OTHER = [
    "(APIServer pid=1) INFO:     Started server process [1]",
    "[2026-11-29 10:00:00 TP0] Decode batch, #running-req: 1, #token: 512, accept len: 2.64",
    'INFO:     127.0.0.1:52999 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    "Traceback (most recent call last):",
    '  File "scheduler.py", line 3616, in run',
    "Request timed out: retrying.",
]
OBJ: dict[str, Any] = {
    "rid": "rid-1",
    "text": "a 'b' \"c\"\n), out={'text': '",
    "input_ids": None,
    "sampling_params": {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "n": 1, "stop": None},
    "stream": True,
    "lora_path": None,
    "custom_labels": {"tenant": "a"},
    "no_logs": False,
}


def cut(value: Any, most: int) -> str:
    if isinstance(value, str | list) and len(value) > most:
        return f"{value[: most // 2]!r} ... {value[-most // 2 :]!r}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"'{key}': {cut(one, most)}" for key, one in value.items()) + "}"
    return repr(value)


def sglang(obj: dict[str, Any], out: dict[str, Any] | None, *, most: int = 1 << 30, before: str = "") -> str:
    said = ", ".join(f"{key}={cut(value, most)}" for key, value in obj.items())
    said = f"obj=GenerateReqInput({said}, session_params=None, source=Source(url='x'), received_time=1.5)"
    if out is None:
        return f"{before}Receive: {said}"
    return f"{before}Finish: {said}, out={cut(out, most)}"


def ingest(path: Path, *lines: str) -> tuple[list[Record], dict[str, int]]:
    path.write_text("\n".join(lines) + "\n")
    skipped: Counter[str] = Counter()
    return list(read([path], skipped)), dict(skipped)


@pytest.mark.parametrize("before", ["", "[2026-11-29 10:00:01] ", "1779264164565\t2026-11-29T08:02:44.565Z\t"])
def test_sglangs_text_log_gives_what_its_json_log_gives(tmp_path: Path, before: str) -> None:
    of_ids = OBJ | {"rid": "rid-2", "text": None, "input_ids": [1, 2, 3]}
    records, skipped = ingest(
        tmp_path / "server.log",
        *OTHER,
        sglang(OBJ, None, before=before),
        sglang(OBJ, OUT, before=before),
        *OTHER,
        sglang(of_ids, OUT, before=before) + ", headers={'x-smg-routing-key': 'k'}",
    )
    assert skipped == {"incomplete": 1, "no_request": 2 * len(OTHER)}
    text, ids = records
    assert (text.id, text.prompt, text.output, text.temperature, text.top_p) == ("rid-1", OBJ["text"], "x y", 0.7, 0.9)
    assert (ids.prompt_token_ids, ids.output_token_ids) == ([1, 2, 3], IDS)
    for record in records:
        assert record.labels == {"tenant": "a"}
        assert record.engine is not None
        assert (record.engine.windows, record.engine.accepted) == (4, 5)
        assert (record.ts is not None) is before.startswith("[")


def test_what_sglang_cut_leaves_the_figures(tmp_path: Path) -> None:
    long = OBJ | {"text": "it's " * 500}
    longer = OBJ | {"rid": "rid-2", "text": None, "input_ids": list(range(3000))}
    none = {"rid": "rid-3", "sampling_params": {}}
    records, skipped = ingest(
        tmp_path / "server.log",
        sglang(long, OUT, most=2048),
        sglang(longer, OUT, most=2048),
        sglang(none, {"meta_info": META}),
    )
    assert skipped == {}
    assert [(one.id, one.has_ids, one.output) for one in records] == [(f"rid-{i}", False, "") for i in (1, 2, 3)]
    assert all(one.engine is not None and one.engine.windows == 4 for one in records)


def test_requests_of_sglang_that_give_no_sample_are_counted(tmp_path: Path) -> None:
    aborted = OUT | {"meta_info": META | {"finish_reason": {"type": "abort", "message": "timeout", "status_code": 503}}}
    records, skipped = ingest(
        tmp_path / "server.log",
        sglang(OBJ, aborted),
        sglang(OBJ | {"no_logs": True}, OUT),
        sglang(OBJ | {"rid": "HEALTH_CHECK_1.5"}, OUT),
        sglang(OBJ, OUT)[:-40],
        "Receive OpenAI: obj={'model': 'm', 'messages': []}",
    )
    assert records == []
    assert skipped == {"engine_error": 1, "unsupported": 2, "malformed": 1, "incomplete": 1}


PARAMS = (
    "SamplingParams(n=1, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, temperature=0.7,"
    " top_p=0.95, top_k=0, min_p=0.0, seed=None, stop=['temperature=9.0, top_p=0.1'], stop_token_ids=[], max_tokens=64,"
    " structured_outputs=StructuredOutputsParams(json=None), extra_args=None)"
)
INFO = "(APIServer pid=1) INFO 06-14 17:27:48 [logger.py:65] "
DEBUG = "(APIServer pid=1) DEBUG 06-14 17:27:48 [logger.py:50] "


def details(id: str, prompt: str | None, ids: list[int] | None) -> str:
    said = "Request %s details: prompt: %r, prompt_token_ids: %s, prompt_embeds shape: %s."
    return DEBUG + said % (id, prompt, ids, None)


def received(id: str, params: str = PARAMS, lora: str | None = None) -> str:
    return INFO + f"Received request {id}: params: {params}, lora_request: {lora}."


def received_before_011(id: str, prompt: str, ids: list[int] | None) -> str:
    said = (
        "Received request %s: prompt: %r, params: %s, prompt_token_ids: %s, prompt_embeds shape: %s, lora_request: %s."
    )
    return INFO + said % (id, prompt, PARAMS, ids, None, None)


def generated(id: str, output: str, ids: object, reason: str | None = "stop", stream: str = "") -> str:
    said = "Generated response %s%s: output: %r, output_token_ids: %s, finish_reason: %s"
    return INFO + said % (id, stream, output, ids, reason)


DELTA, COMPLETE = " (streaming delta)", " (streaming complete)"


def test_vllms_messages_about_a_request_make_a_record(tmp_path: Path) -> None:
    lora = "LoRARequest(lora_name='sql', lora_int_id=1, lora_path='/l', base_model_name=None)"
    records, skipped = ingest(
        tmp_path / "vllm.log",
        *OTHER,
        details("chatcmpl-1", "say 'prompt_token_ids: [9]'\n", [1, 2, 3]),
        received("chatcmpl-1", lora=lora),
        received_before_011("cmpl-2-0", "it's, prompt_token_ids: [9], x", [4, 5]),
        OTHER[0],
        generated("cmpl-2", "b\n', output_token_ids: [8]", (7, 8), "length"),
        generated("chatcmpl-1", "a", [5, 6, 7]),
    )
    assert skipped == {"no_request": len(OTHER) + 1}
    second, first = records
    assert (first.id, first.prompt_token_ids, first.output_token_ids) == ("chatcmpl-1", [1, 2, 3], [5, 6, 7])
    assert (second.id, second.prompt_token_ids, second.output_token_ids) == ("cmpl-2", [4, 5], [7, 8])
    assert (first.temperature, first.top_p, first.top_k, first.adapter) == (0.7, 0.95, -1, "sql")
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")
    assert first.deployment == {"engine": "vllm"}
    assert (first.output, first.prompt) == (None, None)


def test_a_stream_of_vllm_is_whole_if_as_many_ids_were_printed_as_it_says(tmp_path: Path) -> None:
    lines = []
    for id, said in (("chatcmpl-1", 3), ("chatcmpl-2", 4)):
        lines += [
            details(id, None, [1, 2]),
            received(id),
            generated(id, "a", [5, 6], None, DELTA),
            generated(id, "b", [7], "length", DELTA),
            generated(id, f"<streaming_complete: {said} tokens>", None, "streaming_complete", COMPLETE),
        ]
    lines += [details("chatcmpl-3", None, [1]), received("chatcmpl-3"), generated("chatcmpl-3", "a", [5], None, DELTA)]
    lines += [generated("chatcmpl-3", "the text", None, "streaming_complete", COMPLETE)]
    (record,), skipped = ingest(tmp_path / "vllm.log", *lines)
    assert (record.id, record.output_token_ids, record.finish_reason) == ("chatcmpl-1", [5, 6, 7], None)
    assert skipped == {"incomplete": 2}, "the end of a stream has no text, and its ids are not printed"


def test_requests_of_vllm_that_give_no_sample_are_counted(tmp_path: Path) -> None:
    records, skipped = ingest(
        tmp_path / "vllm.log",
        *(received("chatcmpl-1"), generated("chatcmpl-1", "a", [5])),  # at INFO there is no prompt
        generated("chatcmpl-2", "a", [5]),  # came before the log began
        *(details("chatcmpl-3", "x", [1]), received("chatcmpl-3", PARAMS.replace("n=1", "n=2"))),
        generated("chatcmpl-3", "a", [5]),
        *(details("chatcmpl-4", "x", [1]), received("chatcmpl-4"), generated("chatcmpl-4", "a", [5], "abort")),
        *(details("chatcmpl-5", "x", [1]), received("chatcmpl-5")),
    )
    assert records == []
    assert skipped == {"incomplete": 2, "several_choices": 1, "aborted": 1, "unpaired": 1}


def test_requests_without_answers_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driftwatch.wire.printed.MOST_OPEN", 3)
    lines = [received(f"chatcmpl-{i}") for i in range(10)]
    last = [details("chatcmpl-9", "x", [1]), generated("chatcmpl-9", "a", [5]), generated("chatcmpl-0", "a", [5])]
    records, skipped = ingest(tmp_path / "vllm.log", *lines, *last)
    assert [record.id for record in records] == ["chatcmpl-9"]
    assert skipped == {"unpaired": 9, "incomplete": 1}


TEXT = st.text(max_size=40) | st.sampled_from(
    ["'", '"', "', output_token_ids: [1], finish_reason: stop", " ... ", "{'"]
)


@given(TEXT, TEXT, st.lists(st.integers(0, 200_000), min_size=1, max_size=5))
def test_texts_are_never_taken_for_more_than_texts(prompt: str, output: str, ids: list[int]) -> None:
    reader = Reader()
    assert reader.take(details("chatcmpl-1", prompt, [1, 2])) is None
    assert reader.take(received("chatcmpl-1")) is None
    record = reader.take(generated("chatcmpl-1", output, ids))
    assert record is not None
    assert (record.prompt_token_ids, record.output_token_ids, record.temperature) == ([1, 2], ids, 0.7)
    line = sglang(OBJ | {"text": prompt or "x"}, OUT | {"text": output or "x"})
    record = reader.take(line)
    assert record is not None
    assert (record.prompt, record.output) == (prompt or "x", output or "x")


def test_a_file_of_other_lines_is_refused_at_its_first(tmp_path: Path) -> None:
    for lines in (OTHER, [*OTHER, '{"id": "x", "prompt": "a", "output": "b"}']):
        with pytest.raises(RecordError, match=r"server.log:1: not a JSON object"):
            ingest(tmp_path / "server.log", *lines)


NOISE = ['{"level": "info", "msg": "started", "port": 30000}', '{"id": "x"}', "[1, 2]"]


@pytest.mark.parametrize("first", [[], OTHER])
def test_json_that_an_engine_prints_beside_its_requests_is_counted(tmp_path: Path, first: list[str]) -> None:
    request = sglang(OBJ, OUT, before="")
    (record,), skipped = ingest(tmp_path / "server.log", *first, *NOISE, request, *NOISE)
    assert (record.id, skipped) == ("rid-1", {"no_request": len(first) + 2 * len(NOISE)})
    with pytest.raises(RecordError, match=r"server.log:1: (id: Field required|not a JSON object)"):
        ingest(tmp_path / "server.log", *first, *NOISE)


def test_a_broken_record_among_records_is_refused(tmp_path: Path) -> None:
    good, bad = '{"id": "a", "prompt": "p", "output": "o"}', '{"id": "b", "prompt": "p", "output": 5}'
    for lines in ((good, bad), (good, bad, good)):
        with pytest.raises(RecordError, match=r"records.jsonl:2: output: "):
            ingest(tmp_path / "records.jsonl", *lines)


def test_a_json_log_may_have_times_before_its_lines_and_others_between(tmp_path: Path) -> None:
    line = '{"timestamp": "2026-11-29T10:00:00", "event": "request.received", "rid": "r", "obj": {}}'
    records, skipped = ingest(tmp_path / "server.log", *OTHER, f"[2026-11-29 10:00:00] {line}", line)
    assert (records, skipped) == ([], {"incomplete": 2, "no_request": len(OTHER)})
