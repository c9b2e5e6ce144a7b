"""Token ids for samples that came as text, made with the target's tokenizer and chat template.

Text cannot be turned back into the served tokens with certainty, so what is judged on it is marked ``retokenised``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from driftwatch.errors import ModelError
from driftwatch.shadow.device import explain
from driftwatch.shadow.draft import Tokens


class Retokeniser:
    """The target's tokenizer, from its folder or GGUF file. Raises ModelError if there is none."""

    def __init__(self, folder: Path) -> None:
        options: dict[str, Any] = {"local_files_only": True}
        what = f"tokenizer {folder}"
        if folder.suffix == ".gguf" and folder.is_file():
            folder, options["gguf_file"] = folder.parent, folder.name
        if not folder.is_dir():
            raise ModelError(f"{what}: no such folder; give the target's folder")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, **options)
        except Exception as error:  # a broken tokenizer raises whatever the part that met it raises
            raise explain(error, what) from None

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, as a prompt begins."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def encode_formatted(self, text: str) -> list[int]:
        """Token ids of text that went through a chat template already: it has its special tokens."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def opening(self) -> str:
        """What the chat template puts before an answer; empty if there is no template, or it puts nothing."""
        message = [{"role": "user", "content": "x"}]
        try:
            before, after = (
                self._tokenizer.apply_chat_template(message, add_generation_prompt=opened, tokenize=False)
                for opened in (False, True)
            )
        except (TemplateError, TypeError, ValueError, KeyError):
            return ""
        return str(after)[len(before) :] if str(after).startswith(before) else ""

    def tokens(self, text: dict[str, Any]) -> Tokens | None:
        """Prompt and output ids of ``messages`` or ``prompt`` with ``output``; None where the template refuses."""
        output = self._tokenizer(text["output"], add_special_tokens=False)["input_ids"]
        if "messages" in text:
            try:
                encoded = self._tokenizer.apply_chat_template(
                    text["messages"], add_generation_prompt=True, tokenize=True, return_dict=True
                )
            except (TemplateError, TypeError, ValueError, KeyError):
                return None
            return Tokens(encoded["input_ids"], output)
        return Tokens(self.encode(text["prompt"]), output)

    def misfit(self, draft: Path, vocabulary: int | None) -> str | None:
        """Why a draft cannot propose this tokenizer's tokens, if so: its own tokenizer differs, or it has too few ids.

        ``vocabulary`` is None for a draft that maps its ids to the target's.
        """
        ours: dict[str, int] = self._tokenizer.get_vocab()
        if (draft / "tokenizer.json").exists():
            theirs = Retokeniser(draft)._tokenizer.get_vocab()
            different = sorted((id, token) for token, id in theirs.items() if ours.get(token) != id)
            if different:
                id, token = different[0]
                return f"its tokenizer is another one: {len(different)} tokens differ, the first is {token!r} (id {id})"
        if vocabulary is not None and vocabulary <= max(ours.values()):
            return f"it has {vocabulary} token ids, the target's tokenizer goes up to {max(ours.values())}"
        return None
