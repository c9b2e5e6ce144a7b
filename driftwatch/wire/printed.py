"""Request logs that engines print as text, among whatever else they print: SGLang's and vLLM's.

- SGLang 0.5.23, ``--log-requests`` with the format ``text`` (its default): ``Finish: obj=GenerateReqInput(...),
  out={...}``, both as Python writes them. What is longer than the level allows is printed as two literals with
  `` ... `` between.
- vLLM 0.33, ``--enable-log-requests --enable-log-outputs``: several messages about a request, joined by its id.
  ``Request ID details: prompt: '...', prompt_token_ids: [...], ...`` (at ``VLLM_LOGGING_LEVEL=DEBUG``; up to 0.10 the
  next one held this too), ``Received request ID: params: SamplingParams(...), lora_request: None.`` and ``Generated
  response ID: output: '...', output_token_ids: [...], finish_reason: stop``. A stream prints its pieces that had text,
  with their ids, and at its end how many ids there were, or its text. Only ids tell what was served (the text lacks
  reasoning and calls), so a request gives a record where both its ids are whole: most streams do not. Ids that
  ``--max-log-len`` has cut look whole.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from driftwatch.records import Record
from driftwatch.wire import logs, openai
from driftwatch.wire.exchange import Skip

MOST_OPEN = 10_000
"""vLLM's requests without an answer that are remembered: more than any engine has in flight."""

_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*\]")
_SGLANG = re.compile(r"(?:^|\s)(Receive|Finish)(?: OpenAI)?: (obj=\w*[({].*)", re.DOTALL)
_CUT = re.compile(r"""(?<=['"\]]) \.\.\. (?=['"\[])""")

_VLLM = re.compile(
    r"(?:^|\s)(?:Received request (\S+): (?:prompt|params): |Request (\S+) details: prompt: "
    r"|Generated response (\S+?)(?: \(streaming \w+\))?: output: )"
)
_RECEIVED = re.compile(r"Received request \S+: .*?\bparams: SamplingParams\((.*)", re.DOTALL)
_GENERATED = re.compile(
    r"Generated response \S+?( \(streaming delta\)| \(streaming complete\))?: output: (.*),"
    r" output_token_ids: ([\[(][\d\s,]*[\])]|None), finish_reason: (\w+)\s*$",
    re.DOTALL,
)
_PROMPT_IDS = re.compile(r", prompt_token_ids: (\[[\d\s,]*\])")
_STREAMED = re.compile(r"'<streaming_complete: (\d+) tokens>'")
_SETTING = re.compile(r"\b(n|temperature|top_p|top_k)=(-?[\d.e-]+)")
_LORA = re.compile(r"lora_request: LoRARequest\(.*?lora_name='([^']*)'")

Json = dict[str, Any]


@dataclass
class _Open:
    """What vLLM has printed of a request so far."""

    prompt_ids: list[int] | None = None
    settings: dict[str, str] = field(default_factory=dict)
    adapter: str | None = None
    streamed: list[int] = field(default_factory=list)


class Reader:
    """Reads line by line; what belongs together may lie in several."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self.unanswered = 0
        """Requests that were given up since they had no answer for long."""

    @property
    def waiting(self) -> int:
        """Requests without an answer."""
        return len(self._open) + self.unanswered

    def tells(self, line: str) -> bool:
        """Whether the line tells of a request."""
        return _SGLANG.search(line) is not None or _VLLM.search(line) is not None

    def take(self, line: str) -> Record | None:
        """The record that a line which tells of a request completes; None if others follow. Raises Skip."""
        if (found := _SGLANG.search(line)) is not None:
            if found[1] == "Receive":
                raise Skip("incomplete")  # ``Finish`` follows
            moment = _TIME.search(line, 0, found.start())
            return logs.record(_finished(found[2], moment[1] if moment else None))
        found = _VLLM.search(line)
        if found is None:
            return None
        return self._vllm(str(found[found.lastindex or 0]), line[found.start() :].lstrip())

    def _vllm(self, id: str, message: str) -> Record | None:
        if message.startswith("Generated"):
            return self._generated(id, message)
        request = self._open.setdefault(id, _Open())
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
            self.unanswered += 1
        for ids in _PROMPT_IDS.finditer(message):
            request.prompt_ids = _ids(ids[1])  # the last one: before it there may be the prompt's text
        if (received := _RECEIVED.match(message)) is not None:
            # The settings come before the stop strings, so the first of each name is the one.
            request.settings = dict(reversed(_SETTING.findall(received[1])))
            lora = _LORA.search(received[1])
            request.adapter = lora[1] if lora else None
        return None

    def _generated(self, id: str, message: str) -> Record | None:
        found = _GENERATED.match(message)
        if found is None:
            raise Skip("malformed")
        kind, output, ids, reason = found.groups()
        # Completions number the prompts of a request, and their answers do not.
        name = id if id in self._open else f"{id}-0"
        if kind == " (streaming delta)":
            if name in self._open:
                self._open[name].streamed += _ids(ids)
            return None
        request = self._open.pop(name, None)
        if request is None:
            raise Skip("incomplete")
        if request.settings.get("n", "1") != "1":
            raise Skip("several_choices")
        output_ids = _ids(ids)
        if kind is not None:
            stated = _STREAMED.fullmatch(output)
            output_ids, reason = request.streamed, ""
            if stated is None or int(stated[1]) != len(output_ids):
                raise Skip("incomplete")
        if reason == "abort":
            raise Skip("aborted")
        if not request.prompt_ids or not output_ids:
            raise Skip("incomplete")
        return openai.validated(_values(id, request, output_ids, reason))


def _values(id: str, request: _Open, output_ids: list[int], reason: str) -> Json:
    settings = request.settings
    top_k = int(settings["top_k"]) if "top_k" in settings else None
    return {
        "id": id,
        "prompt_token_ids": request.prompt_ids,
        "output_token_ids": output_ids,
        "temperature": float(settings["temperature"]) if "temperature" in settings else None,
        "top_p": float(settings["top_p"]) if "top_p" in settings else None,
        "top_k": -1 if top_k == 0 else top_k,  # both mean all
        "adapter": request.adapter,
        "finish_reason": reason if reason in ("stop", "length") else None,
        "deployment": {"engine": "vllm"},
        "usage": {"completion_tokens": len(output_ids)},
    }


def _ids(text: str) -> list[int]:
    return [] if text == "None" else [int(one) for one in text[1:-1].split(",") if one.strip()]


def _finished(text: str, moment: str | None) -> Json:
    """SGLang's two values in the form of its JSON log. Raises Skip."""
    for source in (text, _CUT.sub(" + ", text)):
        try:
            call = ast.parse(f"dict({source.strip()})", mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if isinstance(call, ast.Call):
            told = {word.arg: dict(_members(word.value)) for word in call.keywords}
            request, answer = told.get("obj", {}), told.get("out", {})
            return {
                "event": logs.FINISHED,
                "timestamp": moment,
                "rid": request.get("rid"),
                "obj": request,
                "out": answer,
            }
    raise Skip("malformed")


def _members(node: ast.expr) -> Iterator[tuple[str, Any]]:
    """Names and values of a printed dataclass or dict, without those that are cut or no plain values."""
    pairs: list[tuple[object, ast.expr]] = []
    if isinstance(node, ast.Call):
        pairs = [(word.arg, word.value) for word in node.keywords]
    elif isinstance(node, ast.Dict):
        names = (key.value if isinstance(key, ast.Constant) else None for key in node.keys)
        pairs = list(zip(names, node.values, strict=True))
    for name, value in pairs:
        if isinstance(name, str):
            if isinstance(value, ast.Dict):
                yield name, dict(_members(value))
                continue
            try:
                yield name, ast.literal_eval(value)
            except (ValueError, TypeError, RecursionError, MemoryError):
                continue
