"""The OpenAI dialect: chat completions and completions, streamed or not, become records.

Choices made here, all of them visible in the record:
- The output text is the reasoning, if the engine reports any, and then the content. The markers that a chat template
  puts between them are not on the wire; such text is retokenised later and marked as such.
- A sampling setting that the client did not send is the engine's default, which is unknown here: it stays None.
- Text alone cannot stand for tool calls, images, or prompts given as token ids: ``unsupported``. A dialect that reports
  token ids may keep what text cannot express.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import ValidationError

from driftwatch.records import EngineFigures, Record
from driftwatch.wire import sse
from driftwatch.wire.encoding import decode
from driftwatch.wire.exchange import Exchange, Skip

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ROUTES = frozenset({CHAT, COMPLETIONS})

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parsed:
    """Both sides of an exchange as JSON: one answer object for a plain answer, one per event for a stream."""

    exchange: Exchange
    request: Json
    answers: list[Json]

    def choices(self) -> Iterator[Json]:
        """The choices of every answer object, in order."""
        for answer in self.answers:
            yield from _objects(answer.get("choices"))

    def messages(self) -> Iterator[Json]:
        """The chat message of each choice: whole, or the delta of a stream."""
        for choice in self.choices():
            message = choice.get("delta") or choice.get("message")
            if isinstance(message, dict):
                yield message

    @property
    def usage(self) -> Json:
        """Token counts as the engine last stated them; empty if it did not."""
        found = [answer["usage"] for answer in self.answers if isinstance(answer.get("usage"), dict)]
        return found[-1] if found else {}


def record(exchange: Exchange) -> Record:
    """The record of an exchange. Raises Skip with a reason from the closed list."""
    parsed = parse(exchange)
    if not text_suffices(parsed):
        raise Skip("unsupported")
    return build(fields(parsed))


def parse(exchange: Exchange) -> Parsed:
    """Read both bodies and refuse what cannot give a record in any dialect. Raises Skip."""
    if exchange.path not in ROUTES:
        raise Skip("aborted" if not exchange.complete else "engine_error" if exchange.status >= 400 else "unsupported")
    request, answers = read(exchange, check_request)
    parsed = Parsed(exchange, request, answers)
    if any(choice.get("index") not in (0, None) for choice in parsed.choices()):
        raise Skip("several_choices")
    reasons = [choice["finish_reason"] for choice in parsed.choices() if choice.get("finish_reason")]
    if not reasons:
        raise Skip("incomplete")
    if reasons[-1] == "abort":  # vLLM and SGLang: stopped from outside, in good order
        raise Skip("aborted")
    return parsed


def read(exchange: Exchange, check: Callable[[str, Json], None] | None = None) -> tuple[Json, list[Json]]:
    """Both bodies as JSON, the answer as one object or one for each event. Raises Skip.

    ``check`` may refuse the request before its answer is read.
    """
    if not exchange.complete:
        raise Skip("aborted")
    if exchange.status >= 400:
        raise Skip("engine_error")
    if exchange.status != 200:
        raise Skip("unsupported")
    request = _object(exchange.request)
    if check is not None:
        check(exchange.path, request)
    body = decode(exchange.response, exchange.headers.get("content-encoding", ""))
    if exchange.streamed:
        data = (event.data for event in sse.parse(body))
        answers = [_object(item) for item in data if item is not None and item.strip() != b"[DONE]"]
    else:
        answers = [_object(body)]
    # An engine that fails late has already said 200: the error is then an answer object, or an event of the stream.
    if any(answer.get("error") or answer.get("object") == "error" for answer in answers):
        raise Skip("engine_error")
    return request, answers


def check_request(path: str, request: Json) -> None:
    """Raise Skip for a request whose answer gives no record, whatever it will be."""
    count = request.get("n")
    if count not in (None, 1) or request.get("use_beam_search") or (request.get("best_of") or 1) != 1:
        raise Skip("several_choices")
    if path == COMPLETIONS:
        prompt = request.get("prompt")
        if isinstance(prompt, list) and not _is_ids(prompt):
            raise Skip("list_prompt")
        # Both mix text into the answer, or around it, that the model did not generate there.
        if request.get("echo") or request.get("suffix"):
            raise Skip("unsupported")


def whole_ids(parsed: Parsed, prompt: object = None, output: object = None) -> tuple[list[int], list[int]] | None:
    """Prompt and output ids, given or as the answer holds them in the manner of vLLM; None unless they are whole.

    Events swallowed by a parser take their ids with them: the engine's own count shows it.
    """
    if not isinstance(prompt, list):
        found = [answer.get("prompt_token_ids") for answer in parsed.answers]
        found += [choice.get("prompt_token_ids") for choice in parsed.choices()]
        prompt = next((ids for ids in found if isinstance(ids, list) and ids), None)
    if prompt is None and _is_ids(parsed.request.get("prompt")):
        prompt = parsed.request["prompt"]
    if not isinstance(output, list):
        given = [ids for choice in parsed.choices() if isinstance(ids := choice.get("token_ids"), list)]
        output = [token for ids in given for token in ids]
    counted = parsed.usage.get("completion_tokens")
    if not isinstance(prompt, list) or not prompt or not output or (counted is not None and counted != len(output)):
        return None
    return prompt, output


def text_suffices(parsed: Parsed) -> bool:
    """Whether messages or prompt and the output text say all that the model saw and generated."""
    if parsed.exchange.path == COMPLETIONS:
        return isinstance(parsed.request.get("prompt"), str)
    # Tools are part of the rendered prompt; their calls are generated tokens without text.
    called = any(message.get("tool_calls") or message.get("function_call") for message in parsed.messages())
    return not called and not parsed.request.get("tools") and not is_multimodal(parsed)


def is_multimodal(parsed: Parsed) -> bool:
    """Whether a message holds anything but text: a draft sees only placeholders there."""
    parts = (part for message in _objects(parsed.request.get("messages")) for part in _objects(message.get("content")))
    return any(part.get("type") not in ("text", None) for part in parts)


def fields(parsed: Parsed) -> Json:
    """The values of a record that every dialect shares."""
    exchange, request, usage = parsed.exchange, parsed.request, parsed.usage
    chat = exchange.path == CHAT
    prompt, session = request.get("prompt"), request.get("session_id")
    details = usage.get("prompt_tokens_details")
    model = next((answer["model"] for answer in parsed.answers if answer.get("model")), request.get("model"))
    return {
        "id": exchange.id,
        "messages": request.get("messages") if chat else None,
        "prompt": prompt if isinstance(prompt, str) and not chat else None,
        "output": _output(parsed),
        "temperature": request.get("temperature"),
        "top_p": request.get("top_p"),
        "top_k": request.get("top_k"),
        "labels": dict(exchange.labels),
        "ts": exchange.started_at,
        "session": exchange.session or (session if isinstance(session, str) and session else None),
        "model": model,
        "finish_reason": [choice["finish_reason"] for choice in parsed.choices() if choice.get("finish_reason")][-1],
        "cached_tokens": details.get("cached_tokens") if isinstance(details, dict) else None,
        "timing": timing(exchange, usage.get("completion_tokens")),
        "deployment": dict(exchange.deployment),
        # Not part of the format, kept as it keeps all unknown fields: what the engine counted.
        **({"usage": usage} if usage else {}),
    }


def with_ids(exchange: Exchange, parsed: Parsed) -> tuple[Json, tuple[list[int], list[int]] | None]:
    """Fields of a record with the token ids, where the answer holds them whole. Raises Skip if text would not do."""
    if is_multimodal(parsed):
        raise Skip("unsupported")
    values, ids = fields(parsed), whole_ids(parsed)
    if ids is not None:
        values |= {"prompt_token_ids": ids[0], "output_token_ids": ids[1], "timing": timing(exchange, len(ids[1]))}
    elif not text_suffices(parsed):
        raise Skip("unsupported")
    return values, ids


def timing(exchange: Exchange, tokens: object) -> Json:
    """The timing of a record. Time per token needs a stream and the engine's own count: chunks are not tokens."""
    return {
        "ttft_s": exchange.ttft_s,
        "tpot_s": time_per_token(exchange.ttft_s, exchange.e2e_s, tokens),
        "e2e_s": exchange.e2e_s,
    }


def time_per_token(ttft_s: float | None, e2e_s: float | None, tokens: object) -> float | None:
    """Seconds per output token behind the first; None where unknown."""
    if ttft_s is None or e2e_s is None or not isinstance(tokens, int) or tokens < 2:
        return None
    return max(0.0, e2e_s - ttft_s) / (tokens - 1)


def build(values: Json) -> Record:
    """Validate the values of a record. Raises Skip: ``malformed`` when a client or engine sent what cannot be."""
    if not values["output"] and not values.get("output_token_ids"):
        raise Skip("no_output")
    return validated(values)


def validated(values: Json) -> Record:
    """A record of these values, perhaps without any text. Raises Skip.

    Figures of a shape that the engine was not known to give cost the record nothing: they are refused with the reason.
    """
    try:
        EngineFigures.model_validate(values.get("engine") or {})
    except ValidationError:
        values = values | {"engine": {"refused": "malformed"}}
    try:
        return Record(**values)
    except ValidationError:
        raise Skip("malformed") from None


def _output(parsed: Parsed) -> str:
    if parsed.exchange.path == COMPLETIONS:
        return "".join(_text(choice.get("text")) for choice in parsed.choices())
    messages = list(parsed.messages())
    # vLLM has renamed the field; never both are filled in.
    reasoning = (_text(message.get("reasoning")) or _text(message.get("reasoning_content")) for message in messages)
    return "".join(reasoning) + "".join(_text(message.get("content")) for message in messages)


def _object(data: bytes) -> Json:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise Skip("malformed") from None
    if not isinstance(value, dict):
        raise Skip("malformed")
    return value


def _objects(value: object) -> Iterator[Json]:
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
