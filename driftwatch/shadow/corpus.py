"""Training data as SpecForge reads it, and production samples: rows of prompt tokens for a sketch.

A row is one JSON object a line (the forms that SpecForge 0.2.0 accepts, and our own):

* pre-tokenised ``{"input_ids", "loss_mask"}``: an answer begins where the mask turns to 1;
* ``{"conversations": [{"role", "content"}, ..]}``, or ``from`` and ``value`` with ``human`` and ``gpt``;
* preformatted ``{"text"}``: an answer begins after the template's generation prompt;
* a driftwatch Record.

Of several answers in one row one is chosen, by a hash of the line: turns of one conversation are not independent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import orjson
from numpy.typing import NDArray

from driftwatch.drift.sketch.build import Row
from driftwatch.errors import ModelError, SketchError
from driftwatch.records import parse_record, read_lines
from driftwatch.shadow.open import folder_of
from driftwatch.shadow.tokenizer import Retokeniser
from driftwatch.shadow.weights import read_tensor, tensor_names

ROLES = {"human": "user", "gpt": "assistant"}
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight", "embed_in.weight")


@dataclass
class Corpus:
    """Rows of files, and how many lines gave none, by reason."""

    tokenizer: Retokeniser | None
    skipped: Counter[str] = field(default_factory=Counter)

    def rows(self, paths: Iterable[Path]) -> Iterator[Row]:
        """Raises SketchError, or RecordError, naming file and line, for a line that is no row."""
        for path in paths:
            for number, line in read_lines(path):
                row = self._row(line, f"{path}:{number}")
                if isinstance(row, Row):
                    yield row
                else:
                    self.skipped[row] += 1

    def _row(self, line: bytes, where: str) -> Row | str:
        try:
            found = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise SketchError(f"{where}: not a JSON object ({error})") from None
        pick = crc32(line)
        try:
            match found:
                case {"input_ids": list(ids), "loss_mask": list(mask)}:
                    return _masked(np.asarray(ids, np.int64), np.asarray(mask, np.int64), pick)
                case {"conversations": list(turns)}:
                    return self._conversation([_message(turn) for turn in turns], pick, where)
                case {"text": str(text)}:
                    return self._preformatted(text, pick, where)
        except (TypeError, ValueError, OverflowError) as error:
            raise SketchError(f"{where}: {' '.join(str(error).split())}") from None
        return self._record(line, where)

    def _conversation(self, messages: list[dict[str, Any]], pick: int, where: str) -> Row | str:
        answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant" and i > 0]
        if not answers:
            return "no_answer"
        chosen = self._turn(messages, answers[pick % len(answers)], where)
        whole = self._turn(messages, answers[-1], where)
        return "template_refused" if chosen is None or whole is None else Row(chosen.prompt, whole.text)

    def _turn(self, messages: list[dict[str, Any]], answer: int, where: str) -> Row | None:
        content = messages[answer].get("content")
        text = {"messages": messages[:answer], "output": content if isinstance(content, str) else ""}
        return _tokenised(self._needed(where), text)

    def _preformatted(self, text: str, pick: int, where: str) -> Row | str:
        tokenizer = self._needed(where)
        opening = tokenizer.opening()
        parts = text.split(opening) if opening else [text]
        if len(parts) < 2:
            return "no_answer"
        chosen = opening.join(parts[: 1 + pick % (len(parts) - 1)]) + opening
        return Row(_ids(tokenizer.encode_formatted(chosen)), _ids(tokenizer.encode_formatted(text)))

    def _record(self, line: bytes, where: str) -> Row | str:
        record = parse_record(line, where=where, empty=True)
        if record.is_empty:
            return "too_short"
        if record.prompt_token_ids and record.output_token_ids:
            return _row(record.prompt_token_ids, record.output_token_ids)
        text = record.model_dump(include={"messages", "prompt", "output"}, exclude_none=True)
        return _tokenised(self._needed(where), text) or "template_refused"

    def _needed(self, where: str) -> Retokeniser:
        if self.tokenizer is None:
            raise SketchError(f"{where}: text without token ids; give --target, whose tokenizer reads it")
        return self.tokenizer


def _masked(ids: NDArray[np.int64], mask: NDArray[np.int64], pick: int) -> Row | str:
    if ids.ndim != 1 or ids.shape != mask.shape:
        raise ValueError(f"input_ids and loss_mask must be equally long lists (got {ids.shape} and {mask.shape})")
    if len(ids) and (ids.min() < 0 or ids.max() >= 2**31):
        raise ValueError("input_ids must be token ids, from 0 on")
    starts = np.flatnonzero(np.diff(mask != 0, prepend=False) & (mask != 0))
    starts = starts[starts > 0]
    if not len(starts):
        return "no_answer"
    return Row(ids[: starts[pick % len(starts)]], ids)


def _message(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise TypeError("conversations must hold objects")
    message: dict[str, Any] = turn
    if "from" in turn and "value" in turn:
        message = {"role": turn["from"], "content": turn["value"]}
    return message | {"role": ROLES.get(str(message.get("role")), message.get("role"))}


def _tokenised(tokenizer: Retokeniser, text: dict[str, Any]) -> Row | None:
    tokens = tokenizer.tokens(text)
    return None if tokens is None else _row(tokens.prompt, tokens.output)


def _row(prompt: Iterable[int], output: Iterable[int]) -> Row:
    ids = _ids(prompt)
    return Row(ids, np.concatenate([ids, _ids(output)]))


def _ids(tokens: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(tokens, np.int64)


def input_embedding(draft: Path, target: Path | None) -> NDArray[np.float32]:
    """The input embedding [vocabulary, hidden] that goes with the tokens: the target's, else the draft's own.

    Raises ModelError if neither has one over the whole vocabulary.
    """
    if target is not None:
        return read_tensor(target, EMBEDDINGS, f"target {target}").float().numpy()
    folder = folder_of(draft)
    what = f"draft {folder}"
    names = tensor_names(folder, what)
    if any(name.endswith("d2t") for name in names) or not any(name.endswith(EMBEDDINGS) for name in names):
        raise ModelError(f"{what} has no embedding of the target's whole vocabulary; give --target")
    return read_tensor(folder, EMBEDDINGS, what).float().numpy()
