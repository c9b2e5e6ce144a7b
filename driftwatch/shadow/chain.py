"""Chain drafts: any causal language model on the target's vocabulary, whole or cut.

A cut vocabulary carries an int64 tensor ``d2t`` [draft vocabulary] in its safetensors, the offset convention of
EAGLE-3 checkpoints: target id = draft id + d2t[draft id]. A token outside it can never be proposed, and is fed as the
draft id that config.json names as ``driftwatch_unk_id``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from driftwatch.acceptance import Weights
from driftwatch.errors import ModelError
from driftwatch.shadow.device import explain
from driftwatch.shadow.draft import Fingerprint, Tokens, hash_weights, read_config

transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # what it reports is checked below

HEAD_ROWS = 4096
"""Rows whose logits are held at a time."""


class ChainDraft:
    """A small causal language model that proposes its argmax, replayed by one prefill."""

    def __init__(self, model: Any, to_target: torch.Tensor | None, unknown: int, fingerprint: Fingerprint) -> None:
        self.fingerprint = fingerprint
        self._backbone = model.base_model
        self._head = model.get_output_embeddings()
        self._device = model.device
        self._to_target = to_target
        self._to_draft: torch.Tensor | None = None
        if to_target is not None:
            size = int(to_target.max()) + 1
            self._to_draft = torch.full((size,), unknown, dtype=torch.long)
            self._to_draft[to_target] = torch.arange(len(to_target))
        self._unknown = unknown

    @classmethod
    def load(cls, folder: Path, *, device: torch.device, dtype: torch.dtype) -> ChainDraft:
        """Load a checkpoint folder. Raises ModelError with one line if it is not a whole causal language model."""
        config = read_config(folder)
        sha256 = hash_weights(folder)
        try:
            loader: Any = AutoModelForCausalLM
            options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
            model, info = loader.from_pretrained(folder, dtype=dtype, local_files_only=True, **options)
        except Exception as error:  # a broken checkpoint raises whatever the part that met it raises
            raise explain(error, f"draft {folder}") from None
        if mismatched := info["mismatched_keys"]:
            raise ModelError(
                f"draft {folder}: tensor {sorted(mismatched)[0][0]} does not have the shape config.json says"
            )
        if missing := sorted(info["missing_keys"]):
            raise ModelError(f"draft {folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
        if unused := sorted(set(info["unexpected_keys"]) - {"d2t"}):
            raise ModelError(f"draft {folder}: {len(unused)} tensors belong to no part of it, the first is {unused[0]}")
        to_target = _vocabulary_map(folder)
        vocabulary = int(model.get_output_embeddings().weight.shape[0])
        if to_target is not None and len(to_target) != vocabulary:
            raise ModelError(f"draft {folder}: d2t has {len(to_target)} entries for a vocabulary of {vocabulary}")
        fingerprint = Fingerprint("chain", sha256, sum(p.numel() for p in model.parameters()), vocabulary, str(folder))
        model = model.to(device).eval()
        return cls(model, to_target, int(config.get("driftwatch_unk_id", 0)), fingerprint)

    @property
    def mapped(self) -> bool:
        """Whether its ids are mapped to the target's, so that its vocabulary may be smaller."""
        return self._to_target is not None

    def skip_reason(self, tokens: Tokens) -> str | None:
        if tokens.judged < 1:
            return "too_short"
        if self._to_target is None and max(*tokens.prompt, *tokens.output) >= self.fingerprint.vocabulary:
            return "outside_vocabulary"
        return None

    @torch.inference_mode()
    def replay(self, batch: Sequence[Tokens]) -> list[Weights]:
        """One forward pass over the padded batch; the head runs over judged rows alone.

        Padding is behind the tokens and attention is causal, so no row sees it.
        """
        width = max(tokens.length for tokens in batch)
        ids = torch.zeros((len(batch), width), dtype=torch.long)
        wanted = torch.zeros((len(batch), width), dtype=torch.bool)
        served: list[int] = []
        for i, tokens in enumerate(batch):
            ids[i, : tokens.length] = torch.tensor([*tokens.prompt, *tokens.output[:-1]])
            wanted[i, len(tokens.prompt) : tokens.length] = True
            served += tokens.output[1:]
        hidden = self._backbone(input_ids=self._draft_ids(ids).to(self._device), use_cache=False).last_hidden_state
        proposed = self._argmax(hidden[wanted.to(self._device)])
        hits = (proposed == torch.tensor(served)).numpy().astype(np.float64)
        return [Weights(part[:, None]) for part in np.split(hits, np.cumsum([tokens.judged for tokens in batch])[:-1])]

    def _draft_ids(self, ids: torch.Tensor) -> torch.Tensor:
        if self._to_draft is None:
            return ids
        known = ids < len(self._to_draft)
        return torch.where(known, self._to_draft[torch.where(known, ids, 0)], self._unknown)

    def _argmax(self, rows: torch.Tensor) -> torch.Tensor:
        """Target ids of the draft's first choices, [rows]; logits never held for more than HEAD_ROWS."""
        best = torch.cat([self._head(part).argmax(dim=-1) for part in torch.split(rows, HEAD_ROWS)]).cpu()
        return best if self._to_target is None else self._to_target[best]


def _vocabulary_map(folder: Path) -> torch.Tensor | None:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if "d2t" in file.keys():  # noqa: SIM118  (not a dict)
                offsets: torch.Tensor = file.get_tensor("d2t").long()
                return offsets + torch.arange(len(offsets))
    return None
