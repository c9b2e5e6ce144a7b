"""Causal language models as the shadow runs them: strictly loaded, prefilled in pieces, logits only where asked."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from driftwatch.errors import ModelError
from driftwatch.shadow.device import explain
from driftwatch.shadow.packing import Packed
from driftwatch.shadow.states.source import Read, Reduce

transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # what it reports is checked below

PREFILL_TOKENS = 16_384
"""Tokens of one forward pass at most, padding included, unless told otherwise."""

MASK_ELEMENTS = 1 << 28
"""A pass over new tokens x cached tokens needs an attention mask of that size: longer contexts, shorter passes."""


def load_model(
    what: str,
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    device_map: Any = None,
    ignored: Collection[str] | None = None,
) -> Any:
    """A causal language model from a checkpoint folder or a GGUF file, in evaluation mode.

    ``ignored`` are tensors that may be there besides the model's own; None is any. Raises ModelError with one line
    if the checkpoint is not whole.
    """
    loader: Any = AutoModelForCausalLM
    named = f"{what} {path}"
    options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True, "local_files_only": True}
    if path.suffix == ".gguf":
        path, options["gguf_file"] = path.parent, path.name
    options["device_map"] = device_map if device_map is not None else {"": device}  # quantised weights cannot be moved
    try:
        model, info = loader.from_pretrained(path, dtype=dtype, **options)
    except Exception as error:  # a broken checkpoint raises whatever the part that met it raises
        raise explain(error, named) from None
    if mismatched := info["mismatched_keys"]:
        name = sorted(mismatched)[0][0]
        raise ModelError(f"{named}: tensor {name} does not have the shape config.json says")
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"{named}: {len(missing)} tensors are missing, the first is {missing[0]}")
    unused = sorted(set(info["unexpected_keys"]) - set(ignored or ()))
    if ignored is not None and unused:
        raise ModelError(f"{named}: {len(unused)} tensors belong to no part of it, the first is {unused[0]}")
    return model.eval()


class Causal:
    """A loaded model: its backbone by pieces, its layers by number, its logits by rows."""

    def __init__(self, model: Any, *, prefill_tokens: int = PREFILL_TOKENS) -> None:
        self.model = model
        self.backbone = model.base_model
        self.prefill_tokens = prefill_tokens
        self._head = model.get_output_embeddings()
        config = model.config.get_text_config()
        self.config = config
        self._softcap = getattr(config, "final_logit_softcapping", None)
        scale = getattr(config, "logit_scale", None)
        self._scale = float(scale) if scale is not None else 1.0 / float(getattr(config, "logits_scaling", 1.0) or 1.0)
        accepted = inspect.signature(self.backbone.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.20

    @property
    def device(self) -> torch.device:
        """Where its token ids go in: the embedding's."""
        return self.embedding.device

    @property
    def draft_device(self) -> torch.device:
        """Where its output head lies."""
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def gives(self) -> range:
        """Every layer, as indices into Hugging Face's ``hidden_states``."""
        return range(self.layers + 1)

    @property
    def token_ids(self) -> int:
        return len(self.embedding)

    @property
    def embedding(self) -> torch.Tensor:
        """[vocabulary, hidden], as stored: engines feed drafts the rows of the table, without a model's own scaling."""
        weight: torch.Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def vocabulary(self) -> int:
        return int(self._head.weight.shape[0])

    @property
    def positions(self) -> int | None:
        """The most tokens that it can be fed, where it has learnt a table of positions and knows none behind it; None
        where positions are computed. (OPT's table has two rows more than ``max_position_embeddings``.)"""
        named = getattr(self.config, "max_position_embeddings", None)
        tables = (one for one in self.backbone.modules() if isinstance(one, torch.nn.Embedding))
        learnt = any(len(one.weight) in (named, (named or 0) + 2) for one in tables if one.weight is not self.embedding)
        return int(named) if named is not None and learnt else None

    @property
    def hidden(self) -> int:
        return int(self.config.hidden_size)

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def head(self) -> Any:
        """The output head alone, a module from [rows, hidden] to [rows, vocabulary]: the order of its values is the
        model's, their size only after :meth:`logits`."""
        return self._head

    @property
    def head_weight(self) -> torch.Tensor:
        """[vocabulary, hidden] of the output head, as stored."""
        weight: torch.Tensor = self._head.weight
        return weight

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] after the final norm to [rows, vocabulary], with the scaling some families apply."""
        found: torch.Tensor = self._head(rows.to(self._head.weight.device))
        if self._scale != 1.0:
            found = found * self._scale
        if self._softcap:
            found = torch.tanh(found / self._softcap) * self._softcap
        return found

    @torch.inference_mode()
    def check_logits(self) -> None:
        """Raises ModelError if a full forward pass computes other logits than :meth:`logits`: a family that scales
        them in a way not known here."""
        ids = torch.arange(1, 5, device=self.device)[None]
        whole = self.model(input_ids=ids, use_cache=False).logits[0].float().cpu()
        if not bool(torch.isfinite(whole).all()):
            raise ModelError(f"target {self.model.name_or_path}: its logits are not finite; are its weights whole?")
        parts = self.logits(self.backbone(input_ids=ids, use_cache=False).last_hidden_state[0]).float().cpu()
        scale = float(whole.abs().max()) or 1.0
        if not torch.allclose(whole, parts, atol=0.02 * scale, rtol=0.02):
            family = type(self.model).__name__
            raise ModelError(f"{family} scales its logits in a way not known here, so its probabilities would be wrong")

    def read(self, packed: Packed, layers: Sequence[int], reduce: Reduce, *, final: bool) -> Read:
        """One prefill of the padded batch; see :class:`driftwatch.shadow.states.source.States`."""
        states: list[torch.Tensor] = []

        def last_states() -> Iterator[tuple[int, torch.Tensor]]:
            passes = self.prefill(packed.ids.to(self.device), capture=layers, reduce=reduce, final=final)
            for start, kept, last in passes:
                assert kept is not None
                states.append(kept)
                if last is not None:
                    yield start, last

        if final:
            rows = packed.gather(last_states())  # piece by piece: the last states are never held whole
            return Read(torch.cat(states, dim=1), rows)
        list(last_states())
        return Read(torch.cat(states, dim=1), None)

    def prefill(
        self,
        ids: torch.Tensor,
        *,
        capture: Sequence[int] = (),
        reduce: Reduce | None = None,
        final: bool = True,
    ) -> Iterator[tuple[int, torch.Tensor | None, torch.Tensor | None]]:
        """Forward passes over [batch, width] ids, padding behind: yields (first position, reduced, last hidden).

        Long inputs go in pieces through a cache, so that no pass is larger than the setting. ``reduce`` turns the
        captured layers, each [batch, piece, hidden] in order of ``capture``, into what is kept of them. Without
        ``final``, layers behind the last captured one are not run, and the last hidden states are None.
        """
        width = ids.shape[1]
        piece = self._piece(ids.shape[0], width)
        options: dict[str, Any] = {"use_cache": False}
        if piece < width:
            options = {"use_cache": True, self._cache_name: DynamicCache(config=self.config)}
        with self._captured(capture, stop=not final) as captured:
            for start in range(0, width, piece):
                done = self.backbone(input_ids=ids[:, start : start + piece], **options)
                kept = reduce([captured[index] for index in capture]) if reduce else None
                captured.clear()
                yield start, kept, done.last_hidden_state if final else None

    def _piece(self, batch: int, width: int) -> int:
        """Positions of one pass; more than one pass only where one would exceed the setting."""
        if batch * width <= self.prefill_tokens:
            return width
        limit = min(self.prefill_tokens // batch, MASK_ELEMENTS // (batch * width))
        return max(1, min(width, limit))

    @contextmanager
    def _captured(self, indices: Sequence[int], *, stop: bool) -> Iterator[dict[int, torch.Tensor]]:
        """Collect ``hidden_states[index]`` of each pass by hooks, so that no other layer's is kept.

        Index N is the last layer's output before the final norm, which is what engines hand to drafts.
        """
        found: dict[int, torch.Tensor] = {}
        if not indices:
            yield found
            return
        parent, name = _layer_list(self.backbone, self.layers)
        layers = getattr(parent, name)
        hooks = []
        for index in indices:
            if index == 0:
                hooks.append(layers[0].register_forward_pre_hook(_keep_input(found), with_kwargs=True))
            else:
                hooks.append(layers[index - 1].register_forward_hook(_keep_output(found, index)))
        try:
            if stop:
                setattr(parent, name, layers[: max(*indices, 1)])
            yield found
        finally:
            setattr(parent, name, layers)
            for hook in hooks:
                hook.remove()


def _keep_input(found: dict[int, torch.Tensor]) -> Any:
    def hook(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        found[0] = arguments[0] if arguments else options["hidden_states"]

    return hook


def _keep_output(found: dict[int, torch.Tensor], index: int) -> Any:
    def hook(module: Any, arguments: tuple[Any, ...], output: Any) -> None:
        found[index] = output[0] if isinstance(output, tuple) else output

    return hook


def _layer_list(backbone: Any, count: int) -> tuple[Any, str]:
    """The module that holds the decoder layers, and under which name."""
    for parent in backbone.modules():
        for name, child in parent.named_children():
            if isinstance(child, torch.nn.ModuleList) and len(child) == count:
                return parent, name
    raise ModelError(f"{type(backbone).__name__} keeps its layers in a way not known here")
