"""The record format: what is taken, what is refused and in which words."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.errors import RecordError
from driftwatch.records import parse_record, read_records, segment_id, segment_labels

GOOD = {"id": "a", "prompt_token_ids": [1, 2], "output_token_ids": [3]}


def test_unknown_fields_are_kept_and_absent_ones_stay_unknown() -> None:
    record = parse_record(json.dumps(GOOD | {"seed": 7}), where="x")
    assert record.model_extra == {"seed": 7}
    assert record.temperature is None
    assert record.has_ids


def test_text_stands_in_for_ids() -> None:
    record = parse_record(json.dumps({"id": "a", "prompt": "p", "output": "o"}), where="x")
    assert not record.has_ids


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", r"f.jsonl:3: not a JSON object"),
        ("[]", r"f.jsonl:3: .*object"),
        (json.dumps({"prompt_token_ids": [1], "output_token_ids": [1]}), "id: Field required"),
        (json.dumps(GOOD | {"output_token_ids": [-1]}), r"output_token_ids.0: .*greater than or equal to 0 \(got -1\)"),
        (json.dumps(GOOD | {"output_token_ids": ["x" * 100]}), r"output_token_ids.0: .*\.\.\.\)"),
        (json.dumps(GOOD | {"output_token_ids": []}), "belong together: one is missing or empty"),
        (json.dumps({"id": "a", "messages": []}), "needs prompt_token_ids and output_token_ids, or output"),
        (json.dumps(GOOD | {"ts": "2026-01-01T00:00:00"}), "ts: .*timezone"),
        (json.dumps(GOOD | {"weight": 0}), "weight: .*greater than 0"),
        (json.dumps(GOOD | {"labels": {"tenant": 1}}), "labels.tenant: .*string"),
        (json.dumps(GOOD | {"weight": 1e160}), "weight: .*less than or equal"),
        (json.dumps(GOOD | {"weight": "2"}), "weight: .*valid number"),
        (json.dumps(GOOD | {"prompt_token_ids": ["5"]}), "prompt_token_ids.0: .*valid integer"),
        (json.dumps(GOOD | {"top_k": 2**31}), "top_k: .*less than"),
        (json.dumps(GOOD | {"session": "a\x00"}), "session: .*pattern"),
        (json.dumps(GOOD | {"labels": {"tenant": "x" * 300}}), "labels.tenant: .*at most 256"),
        (json.dumps(GOOD | {"deployment": {"a-b": "x"}}), "deployment"),
        (json.dumps(GOOD | {"seed": float("nan")}), "f.jsonl:3: not a JSON object"),
        ("[" * 2000, "f.jsonl:3: not a JSON object"),
    ],
)
def test_a_wrong_record_is_one_line_that_names_place_field_and_value(record: str, message: str) -> None:
    with pytest.raises(RecordError, match=message) as caught:
        parse_record(record, where="f.jsonl:3")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_files_are_read_in_order_whatever_their_compression(tmp_path: Path, suffix: str) -> None:
    lines = "".join(json.dumps(GOOD | {"id": str(i)}) + "\n\n" for i in range(5)).encode()
    compress: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        ".gz": gzip.compress,
        ".zst": zstandard.ZstdCompressor().compress,
    }
    packed = compress[suffix](lines)
    path = tmp_path / f"records.jsonl{suffix}"
    path.write_bytes(packed)
    assert [record.id for record in read_records([path, path])] == list("0123401234")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_truncated_file_is_one_line(tmp_path: Path, suffix: str) -> None:
    lines = "".join(json.dumps(GOOD | {"id": str(i)}) + "\n" for i in range(5000)).encode()
    packed = gzip.compress(lines) if suffix == ".gz" else zstandard.ZstdCompressor().compress(lines)
    path = tmp_path / f"records.jsonl{suffix}"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(RecordError, match="records.jsonl"):
        list(read_records([path]))


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="No such file"):
        list(read_records([tmp_path / "none.jsonl"]))


@given(st.dictionaries(st.text(min_size=1), st.text(), max_size=4))
def test_segment_ids_lead_back_to_their_labels(labels: dict[str, str]) -> None:
    assert segment_labels(segment_id(labels)) == labels


def test_segment_ids_are_sorted_and_encoded() -> None:
    assert segment_id({"tenant": "a,b", "kind": "c=d"}) == "kind=c%3Dd,tenant=a%2Cb"
    assert segment_id({}) == "all"


EMPTY = [
    {"id": "a", "prompt_token_ids": [1], "output_token_ids": []},
    {"id": "b", "prompt_token_ids": [], "output_token_ids": [1]},
]


def test_history_holds_requests_that_came_to_nothing(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in [*EMPTY, GOOD]))
    assert [(one.id, one.is_empty, one.has_ids) for one in read_records([path])] == [
        ("a", True, False),
        ("b", True, False),
        ("a", False, True),
    ]


@pytest.mark.parametrize("one", [*EMPTY, {"id": "c", "prompt_token_ids": [1]}])
def test_whoever_sends_a_sample_is_told_of_its_missing_part(one: dict[str, object]) -> None:
    with pytest.raises(RecordError, match=r"line 3: .*one is missing or empty; give both, or leave the record out"):
        parse_record(json.dumps(one), where="line 3")
