"""The target: any Hugging Face causal language model, whole or sharded, run only as far as a draft needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from driftwatch.errors import ModelError
from driftwatch.settings import HiddenStates, Shadow
from driftwatch.shadow.causal import PREFILL_TOKENS, Causal, load_model
from driftwatch.shadow.device import pick_device, pick_dtype
from driftwatch.shadow.states.engine import EngineStates
from driftwatch.shadow.states.sglang import Sglang
from driftwatch.shadow.states.source import States
from driftwatch.shadow.states.vllm import Vllm


class NoTargetError(ModelError):
    """A draft cannot be replayed without more of its target than is at hand: the engine's own figures remain."""


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
        engine: HiddenStates | None = None,
    ) -> None:
        """``path`` is a checkpoint folder or a GGUF file; ``device_map`` goes to transformers as it is. With an
        ``engine`` the model is never loaded here: only its hidden states can be had."""
        self.path, self.engine = path, engine
        self._device, self._dtype, self._device_map = device, dtype, device_map
        self._prefill_tokens = prefill_tokens
        self._model: Causal | None = None

    @classmethod
    def configured(cls, path: Path, shadow: Shadow, engine: HiddenStates | None = None) -> Target:
        """A target as the settings have it run. Raises SettingsError for a device that is not there."""
        device = pick_device(shadow.device)
        return cls(
            path,
            device=device,
            dtype=pick_dtype(shadow.dtype, device),
            device_map=shadow.device_map,
            prefill_tokens=shadow.batch_tokens,
            engine=engine,
        )

    @classmethod
    def of(cls, model: Any, *, prefill_tokens: int = PREFILL_TOKENS) -> Target:
        """A target that is loaded already."""
        target = cls(Path(model.name_or_path or "model"), device=model.device, dtype=model.dtype)
        target._model = Causal(model, prefill_tokens=prefill_tokens)
        return target

    @property
    def loaded(self) -> bool:
        return self._model is not None

    def states(self) -> States:
        """Where its hidden states come from. Raises ModelError if it cannot be loaded, or its folder not be read."""
        if self.engine is None:
            return self.model()
        url, folder = self.engine.url, self.engine.folder
        engine = Sglang(url) if folder is None else Vllm(url, folder)
        return EngineStates(self.path, engine, self.engine.layers, device=self._device, dtype=self._dtype)

    def model(self) -> Causal:
        """The loaded model. Raises ModelError with one line if it cannot be loaded."""
        if self.engine is not None:
            raise NoTargetError(
                f"target {self.path}: {self.engine.url} gives its hidden states alone, so its probabilities are not at "
                "hand: EAGLE-3 under argmax without agreement, n-gram, and chain drafts under argmax can be replayed"
            )
        if self._model is None:
            model = load_model("target", self.path, device=self._device, dtype=self._dtype, device_map=self._device_map)
            self._model = Causal(model, prefill_tokens=self._prefill_tokens)
            self._model.check_logits()
        return self._model
