"""The target: any Hugging Face causal language model, whole or sharded, run only as far as a draft needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from driftwatch.shadow.causal import PREFILL_TOKENS, Causal, load_model


class Target:
    """Loads on first use, so that drafts which never ask for it cost nothing; loaded once for all drafts."""

    def __init__(
        self,
        path: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        device_map: Any = None,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        """``path`` is a checkpoint folder or a GGUF file; ``device_map`` goes to transformers as it is."""
        self.path = path
        self._device, self._dtype, self._device_map = device, dtype, device_map
        self._prefill_tokens = prefill_tokens
        self._model: Causal | None = None

    @classmethod
    def of(cls, model: Any, *, prefill_tokens: int = PREFILL_TOKENS) -> Target:
        """A target that is loaded already."""
        target = cls(Path(model.name_or_path or "model"), device=model.device, dtype=model.dtype)
        target._model = Causal(model, prefill_tokens=prefill_tokens)
        return target

    @property
    def loaded(self) -> bool:
        return self._model is not None

    def model(self) -> Causal:
        """The loaded model. Raises ModelError with one line if it cannot be loaded."""
        if self._model is None:
            model = load_model("target", self.path, device=self._device, dtype=self._dtype, device_map=self._device_map)
            self._model = Causal(model, prefill_tokens=self._prefill_tokens)
            self._model.check_logits()
        return self._model
