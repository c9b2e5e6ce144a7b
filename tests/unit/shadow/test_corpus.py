"""Every form of training data gives the prompts that were really trained on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driftwatch.drift.sketch.build import Row
from driftwatch.errors import DriftwatchError, ModelError, SketchError
from driftwatch.shadow.corpus import Corpus, input_embedding
from driftwatch.shadow.tokenizer import Retokeniser
from tests.unit.shadow.conftest import DATA

TARGET = DATA / "models" / "target"


@pytest.fixture(scope="module")
def tokenizer() -> Retokeniser:
    return Retokeniser(TARGET)


def written(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path, tokenizer: Retokeniser | None = None) -> tuple[list[tuple[list[int], list[int]]], dict[str, int]]:
    corpus = Corpus(tokenizer)
    rows = [(row.prompt.tolist(), row.text.tolist()) for row in corpus.rows([path])]
    return rows, dict(corpus.skipped)


def test_masked_tokens_give_the_prompt_of_one_answer(tmp_path: Path) -> None:
    one = {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]}
    lines = [one, one | {"loss_mask": [0, 0, 0, 0]}, one | {"loss_mask": [1, 1, 1, 1]}]
    rows, skipped = read(written(tmp_path, *lines))
    assert rows == [([1, 2], [1, 2, 3, 4])]
    assert skipped == {"no_answer": 2}
    turns = [{"input_ids": [i, 2, 3, 4, 5, 6], "loss_mask": [0, 1, 0, 1, 0, 1], "id": i} for i in range(60)]
    rows, _ = read(written(tmp_path, *turns))
    assert {len(prompt) for prompt, _ in rows} == {1, 3, 5}  # each turn is chosen now and then, one a row
    assert all(text == [i, 2, 3, 4, 5, 6] for i, (_, text) in enumerate(rows))


def test_conversations_go_through_the_chat_template(tmp_path: Path, tokenizer: Retokeniser) -> None:
    ask, answer = "How do I open a file?", "Use open(path)."
    openai = {"id": "1", "conversations": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
    sharegpt = {"conversations": [{"from": "human", "value": ask}, {"from": "gpt", "value": answer}]}
    rows, skipped = read(written(tmp_path, openai, sharegpt), tokenizer)
    expected = tokenizer.tokens({"messages": [{"role": "user", "content": ask}], "output": answer})
    assert expected is not None
    assert rows == [(expected.prompt, [*expected.prompt, *expected.output])] * 2
    assert skipped == {}
    assert read(written(tmp_path, {"conversations": [{"role": "user", "content": ask}]}), tokenizer)[1] == {
        "no_answer": 1
    }


def test_a_long_conversation_gives_one_prompt_and_all_of_its_text(tmp_path: Path, tokenizer: Retokeniser) -> None:
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"turn {i}"} for i in range(6)]
    lines = [{"conversations": turns, "id": i} for i in range(40)]
    rows, _ = read(written(tmp_path, *lines), tokenizer)
    assert len({len(prompt) for prompt, _ in rows}) == 3
    assert len({tuple(text) for _, text in rows}) == 1
    assert all(text[: len(prompt)] == prompt for prompt, text in rows)


def test_preformatted_text_is_cut_where_an_answer_begins(tmp_path: Path, tokenizer: Retokeniser) -> None:
    assert tokenizer.opening()
    messages = [{"role": "user", "content": "How do I open a file?"}]
    tokens = tokenizer.tokens({"messages": messages, "output": "Use open(path)."})
    assert tokens is not None
    text = tokenizer._tokenizer.decode([*tokens.prompt, *tokens.output])
    rows, skipped = read(written(tmp_path, {"id": "1", "text": text}, {"text": "no template here"}), tokenizer)
    assert rows == [(tokens.prompt, [*tokens.prompt, *tokens.output])]
    assert skipped == {"no_answer": 1}


def test_records_are_rows_too(tmp_path: Path) -> None:
    path = tmp_path / "sample.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"id": "a", "prompt_token_ids": [1, 2], "output_token_ids": [3]}\n')
    assert read(path) == ([([1, 2], [1, 2, 3])], {})
    empty = {"id": "b", "prompt_token_ids": [1, 2], "output_token_ids": []}
    assert read(written(tmp_path, empty)) == ([], {"too_short": 1}), "a request that came to nothing is no row"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[1", "not a JSON object"),
        ("[1]", "not a JSON object|valid dictionary|object"),
        ('{"input_ids": [1, 2], "loss_mask": [0]}', "must be equally long"),
        ('{"input_ids": [1, "x"], "loss_mask": [0, 1]}', "invalid literal"),
        ('{"input_ids": [1, -2], "loss_mask": [0, 1]}', "token ids, from 0 on"),
        ('{"input_ids": [[1], [2]], "loss_mask": [[0], [1]]}', "must be equally long"),
        ('{"conversations": ["x"]}', "must hold objects"),
        ('{"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}', "--target"),
        ('{"text": "x"}', "--target"),
        ('{"anything": 1}', "id: Field required"),
    ],
)
def test_what_is_no_row_is_named_with_its_line(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input_ids": [1, 2], "loss_mask": [0, 1]}\n' + line + "\n")
    with pytest.raises(DriftwatchError, match=reason) as refused:
        read(path)
    assert str(refused.value).startswith(f"{path}:2: ")
    assert "\n" not in str(refused.value)


def test_the_embedding_is_the_targets_or_the_drafts_own(tmp_path: Path) -> None:
    chain, eagle3 = DATA / "models" / "chain", DATA / "models" / "eagle3"
    assert input_embedding(eagle3, TARGET).shape == (2048, 128)
    own = input_embedding(chain, None)
    assert own.shape == (2048, 96)
    assert own.dtype == np.float32
    with pytest.raises(ModelError, match="no embedding of the target's whole vocabulary; give --target"):
        input_embedding(eagle3, None)
    with pytest.raises(ModelError):
        input_embedding(chain, tmp_path)


def test_a_row_is_cut_where_it_is_very_long() -> None:
    long = np.zeros(20_000, np.int64)
    assert [len(part) for part in (Row(long, long).cut().prompt, Row(long, long).cut().text)] == [8192, 8192]


def test_no_tokenizer_no_text(tmp_path: Path) -> None:
    with pytest.raises(SketchError, match="give --target"):
        read(written(tmp_path, {"id": "a", "prompt": "x", "output": "y"}))
