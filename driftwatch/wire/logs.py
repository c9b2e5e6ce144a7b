"""What engines write into files: SGLang's metrics export and request log, TensorRT-LLM's perf metrics.

Each is JSON lines. A line that says what was served becomes a full record; one that holds figures alone becomes a
record without text, which feeds the engine's cells and brings no replay. Pickled dumps are not read: loading one runs
whatever is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from driftwatch.records import Record
from driftwatch.wire import openai, sglang, trtllm
from driftwatch.wire.exchange import Exchange, Skip

CUT = "..."
LONGEST_LOGGED = 2048
"""At its level 2 SGLang's request log keeps the two halves of what is longer, with ``CUT`` between them."""

FINISHED = "request.finished"
Json = dict[str, Any]


def record(line: Json) -> Record | None:
    """The record of a log line; None if it is of no kind known here. Raises Skip."""
    if isinstance(line.get("request_parameters"), str) and "completion_tokens" in line:
        return _exported(line)
    if is_request(line):
        return _logged(line)
    if isinstance(line.get("perf_metrics"), dict):
        return _perf_metrics(line)
    return None


def is_request(line: Json) -> bool:
    """Whether the line is one of SGLang's request log."""
    return isinstance(line.get("event"), str) and line["event"].startswith("request.")


def _exported(line: Json) -> Record:
    """``--export-metrics-to-file``: the request's parameters as JSON text, and ``meta_info`` flat beside them."""
    try:
        request = orjson.loads(line["request_parameters"])
    except orjson.JSONDecodeError:
        raise Skip("malformed") from None
    if not isinstance(request, dict):
        raise Skip("malformed")
    if request.get("no_logs"):
        raise Skip("unsupported")
    return _figures_only(
        str(line.get("id") or request.get("rid") or ""),
        sglang.figures(line, {}, line.get("completion_tokens")),
        tokens=line.get("completion_tokens"),
        labels=_labels(request),
        ts=_moment(line.get("request_received_ts")),
        timing={"ttft_s": line.get("first_token_latency"), "e2e_s": line.get("e2e_latency")},
        adapter=request.get("lora_path"),
        deployment=_sglang(line),
    )


def _logged(line: Json) -> Record:
    """``--log-requests-format json``: full answers at level 3, cut ones at 2, none below."""
    if line["event"] != FINISHED:
        raise Skip("incomplete")  # the same request's ``request.finished`` follows
    request, answer = line.get("obj"), line.get("out")
    if not isinstance(request, dict) or not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
        raise Skip("malformed")
    meta = answer["meta_info"]
    identity = str(line.get("rid") or meta.get("id") or "")
    if request.get("no_logs") or identity.startswith("HEALTH_CHECK"):
        raise Skip("unsupported")
    started, labels = _moment(line.get("timestamp")), _labels(request)
    request = {key: value for key, value in request.items() if not _is_cut(value)}
    answer = {key: value for key, value in answer.items() if not _is_cut(value)}
    if ("text" in answer or "output_ids" in answer) and (request.get("text") or request.get("input_ids")):
        return sglang.record(
            Exchange(
                id=identity,
                path=sglang.GENERATE,
                request=orjson.dumps(request),
                status=200,
                headers={"content-type": "application/json"},
                response=orjson.dumps(answer),
                labels=labels,
                started_at=started,
                e2e_s=_seconds(meta.get("e2e_latency")),
                deployment={"engine": "sglang"},
            )
        )
    tokens = meta.get("completion_tokens")
    return _figures_only(
        identity,
        sglang.figures(meta, {}, tokens),
        tokens=tokens,
        labels=labels,
        ts=started,
        timing={"e2e_s": _seconds(meta.get("e2e_latency"))},
        adapter=request.get("lora_path"),
        deployment=_sglang(meta),
    )


def _perf_metrics(line: Json) -> Record:
    """Files below ``perf_metrics_output_dir``. Steps are not stated: they are the iterations behind the first."""
    metrics = line["perf_metrics"]
    stats, times = metrics.get("speculative_decoding"), metrics.get("timing_metrics")
    figures = trtllm.counted(stats) if isinstance(stats, dict) else None
    first, last = metrics.get("first_iter"), metrics.get("last_iter")
    if figures is not None and "windows" not in figures and type(first) is int and type(last) is int and last > first:
        figures["windows"] = last - first
    arrived, token, end = (
        _seconds((times if isinstance(times, dict) else {}).get(f"{name}_time"))
        for name in ("arrival", "first_token", "last_token")
    )
    timing = {
        "ttft_s": token - arrived if arrived is not None and token is not None and token >= arrived else None,
        "e2e_s": end - arrived if arrived is not None and end is not None and end >= arrived else None,
    }
    return _figures_only(
        f"trtllm-{line.get('request_id')}-{arrived}",
        figures,
        tokens=None,
        labels={},
        ts=None,  # a steady clock of the server's own
        timing=timing,
        adapter=None,
        deployment={"engine": "trtllm"},
    )


def _figures_only(
    id: str,
    figures: Json | None,
    *,
    tokens: object,
    labels: Mapping[str, str],
    ts: datetime | None,
    timing: Json,
    adapter: object,
    deployment: Json,
) -> Record:
    if not figures or not id:
        raise Skip("no_output")
    values: Json = {
        "id": id,
        "prompt": "",
        "output": "",
        "engine": figures,
        "labels": dict(labels),
        "ts": ts,
        "timing": timing,
        "adapter": adapter if isinstance(adapter, str) and adapter else None,
        "deployment": deployment,
    }
    if type(tokens) is int:
        values["usage"] = {"completion_tokens": tokens}
    return openai.validated(values)


def _sglang(meta: Json) -> Json:
    version = meta.get("weight_version")
    return {"engine": "sglang"} | ({"weight_version": version} if isinstance(version, str) else {})


def _labels(request: Json) -> dict[str, str]:
    labels = request.get("custom_labels")
    return {str(key): str(value) for key, value in labels.items()} if isinstance(labels, dict) else {}


def _is_cut(value: object) -> bool:
    if isinstance(value, str):
        half = LONGEST_LOGGED // 2
        return len(value) == LONGEST_LOGGED + len(CUT) and value[half : half + len(CUT)] == CUT
    return isinstance(value, list) and CUT in value


def _seconds(value: object) -> float | None:
    return float(value) if type(value) in (int, float) and float(value) >= 0 else None  # type: ignore[arg-type]


def _moment(value: object) -> datetime | None:
    """Seconds since the epoch, or an ISO time; one without an offset is the local time of the server, taken as ours."""
    try:
        if type(value) in (int, float):
            return datetime.fromtimestamp(float(value), UTC)  # type: ignore[arg-type]
        return datetime.fromisoformat(value).astimezone(UTC) if isinstance(value, str) else None
    except (ValueError, OverflowError, OSError):
        return None
