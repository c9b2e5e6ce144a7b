"""Files that engines write, and KServe's events, as ``driftwatch ingest`` reads them."""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from driftwatch.cli.ingest import read
from driftwatch.errors import RecordError
from driftwatch.records import Record

from .conftest import Recorded

SPEC = {
    "spec_accept_rate": 5 / 12,
    "spec_accept_length": 2.5,
    "spec_num_correct_drafts": 5,
    "spec_num_proposed_drafts": 12,
    "spec_verify_ct": 4,
    "spec_correct_drafts_histogram": [1, 1, 2, 0],
}
META: dict[str, Any] = {
    "id": "rid-1",
    "finish_reason": {"type": "length", "length": 10},
    "prompt_tokens": 3,
    "completion_tokens": 10,
    "cached_tokens": 0,
    "weight_version": "default",
    "request_received_ts": 1795972686.5,
    "e2e_latency": 0.5,
    **SPEC,
}
PARAMETERS = {"text": "secret prompt", "rid": "rid-1", "stream": False, "custom_labels": {"tenant": "a"}}


def ingest(path: Path, *lines: Any) -> tuple[list[Record], dict[str, int]]:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    skipped: Counter[str] = Counter()
    return list(read([path], skipped)), dict(skipped)


def exported(**meta: Any) -> dict[str, Any]:
    """A line of --export-metrics-to-file, as the exporter of SGLang 0.5.23 builds it."""
    return {"request_parameters": json.dumps(PARAMETERS), **META, **meta}


def test_sglangs_export_gives_figures_and_keeps_no_prompt(tmp_path: Path) -> None:
    (record,), skipped = ingest(tmp_path / "sglang-request-metrics-20261129_10.log", exported())
    assert skipped == {}
    assert "secret" not in record.model_dump_json()
    assert (record.id, record.labels, record.prompt, record.output) == ("rid-1", {"tenant": "a"}, "", "")
    assert record.ts is not None
    assert record.ts.timestamp() == 1795972686.5
    assert record.engine is not None
    assert (record.engine.windows, record.engine.accepted, record.engine.drafted) == (4, 5, None)
    assert record.engine.accepted_histogram == [1, 1, 2, 0]
    assert record.timing is not None
    assert record.timing.e2e_s == 0.5


def test_lines_without_figures_and_those_not_to_be_logged_are_counted(tmp_path: Path) -> None:
    plain = {key: value for key, value in exported().items() if not key.startswith("spec_")}
    private = exported() | {"request_parameters": json.dumps(PARAMETERS | {"no_logs": True})}
    broken = exported() | {"request_parameters": "{"}
    records, skipped = ingest(tmp_path / "x.log", plain, private, broken, exported(id="ok"))
    assert [record.id for record in records] == ["ok"]
    assert skipped == {"no_output": 1, "unsupported": 1, "malformed": 1}


def logged(obj: dict[str, Any], out: dict[str, Any], event: str = "request.finished") -> dict[str, Any]:
    return {"timestamp": "2026-11-29T10:00:00.000001", "event": event, "rid": "rid-1", "obj": obj, "out": out}


IDS = list(range(100, 110))
OBJ = {"text": "a b c", "input_ids": None, "sampling_params": {"temperature": 0.7}, "rid": "rid-1"}
OUT = {"text": "x y", "output_ids": IDS, "meta_info": META}


def test_sglangs_request_log_at_its_full_level_is_a_whole_record(tmp_path: Path) -> None:
    received = {key: value for key, value in logged(OBJ, OUT, "request.received").items() if key != "out"}
    of_ids = logged(OBJ | {"text": None, "input_ids": [1, 2, 3]}, OUT) | {"rid": "rid-2"}
    records, skipped = ingest(tmp_path / "requests.log", received, logged(OBJ, OUT), of_ids)
    assert skipped == {"incomplete": 1}
    text, ids = records
    assert (text.id, text.prompt, text.output, text.temperature) == ("rid-1", "a b c", "x y", 0.7)
    assert (ids.prompt_token_ids, ids.output_token_ids) == ([1, 2, 3], IDS)
    assert text.engine is not None
    assert text.engine.windows == 4


def test_what_the_log_cut_or_left_out_is_not_taken_for_the_request(tmp_path: Path) -> None:
    cut = "a" * 1024 + "..." + "b" * 1024
    records, _ = ingest(
        tmp_path / "requests.log",
        logged(OBJ | {"text": cut}, OUT),
        logged(OBJ | {"text": None, "input_ids": [*range(1024), "...", *range(1024)]}, OUT) | {"rid": "rid-2"},
        logged({"sampling_params": {}, "rid": "rid-3"}, {"meta_info": META}) | {"rid": "rid-3"},
    )
    assert [(record.id, record.has_ids, record.output) for record in records] == [
        ("rid-1", False, ""),
        ("rid-2", False, ""),
        ("rid-3", False, ""),
    ]
    assert all(record.engine is not None for record in records)


def test_tensorrts_perf_metrics(tmp_path: Path) -> None:
    line = {
        "request_id": 7,
        "perf_metrics": {
            "first_iter": 100,
            "last_iter": 104,
            "timing_metrics": {"arrival_time": 10.0, "first_token_time": 10.25, "last_token_time": 11.0},
            "speculative_decoding": {
                "acceptance_rate": 0.5,
                "total_accepted_draft_tokens": 6,
                "total_draft_tokens": 12,
            },
        },
    }
    none = {"request_id": 8, "perf_metrics": {"first_iter": 1, "last_iter": 9, "timing_metrics": {}}}
    (record,), skipped = ingest(tmp_path / "perf.jsonl", line, none)
    assert record.engine is not None
    assert record.engine.model_dump(exclude_none=True) == {"windows": 4, "drafted": 12, "accepted": 6}
    assert record.timing is not None
    assert (record.timing.ttft_s, record.timing.e2e_s) == (0.25, 1.0)
    assert skipped == {"no_output": 1}


def event(kind: str, id: str, data: Any, **more: Any) -> dict[str, Any]:
    """As KServe's logger sends it, in structured mode."""
    return {
        "specversion": "1.0",
        "type": f"org.kubeflow.serving.inference.{kind}",
        "source": "http://localhost:9081/",
        "id": id,
        "time": "2026-11-29T10:00:00.501752983Z",
        "datacontenttype": "application/json",
        "inferenceservicename": "llama",
        "namespace": "default",
        "data": data,
        **more,
    }


def test_kserves_events_are_joined_by_id(tmp_path: Path, recorded: dict[str, Recorded]) -> None:
    plain, streamed = recorded["extra_nonstream_chat"], recorded["plain"]
    encoded = {"data_base64": base64.b64encode(streamed.body).decode()}
    records, skipped = ingest(
        tmp_path / "events.jsonl",
        event("request", "1", json.loads(plain.request)),
        event("response", "2", None, **encoded),
        event("response", "1", json.loads(plain.body)),
        event("request", "2", streamed.request.decode()),
        event("request", "3", {"messages": []}),
        event("response", "4", json.loads(recorded["n2"].request) | {"choices": []}),
        event("outlier", "5", {}),
        event("request", "6", {"instances": [[1]]}),
        event("response", "6", {"predictions": [1]}),
    )
    assert [record.id for record in records] == ["1", "2"]
    assert [len(record.output_token_ids or []) for record in records] == [48, 48]
    assert records[0].labels == {"inferenceservice": "llama"}
    assert records[0].ts is not None
    assert records[1].engine is not None
    assert skipped == {"unpaired": 2, "malformed": 1, "unsupported": 1}


def test_records_of_a_trace_are_read_beside_all_that(tmp_path: Path) -> None:
    trace = Path(__file__).parents[2] / "data" / "traces" / "draft3.T0.jsonl"
    packed = tmp_path / "all.jsonl.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes() + json.dumps(exported()).encode() + b"\n"))
    skipped: Counter[str] = Counter()
    records = list(read([packed], skipped))
    assert (len(records), records[-1].id, skipped) == (73, "rid-1", {})


def test_records_of_requests_that_came_to_nothing_are_counted_and_not_sent(tmp_path: Path) -> None:
    empty = {"id": "a", "prompt_token_ids": [1, 2], "output_token_ids": []}
    records, skipped = ingest(tmp_path / "records.jsonl", empty, empty | {"id": "b", "output_token_ids": [3, 4]}, empty)
    assert ([record.id for record in records], skipped) == (["b"], {"too_short": 2})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x04\x95", "a pickle, which is not read"),
        (b'{"id": "x"}\n', "file:1: needs prompt_token_ids"),
        (b"[2026-11-29 10:00:00] Decode batch, #running-req: 1\n", "file:1: not a JSON object"),
    ],
)
def test_what_is_of_no_known_kind_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=message):
        list(read([path], Counter()))
