"""Hidden states from an engine that serves the target: for a target too large for the shadow's own device.

The engine is an instance of its own, never the one that serves users: extracting takes a vLLM's speculative slot, and
every SGLang answer carries the states as text. It is sent token ids and nothing else. Only the two tables that a head
may lack, embedding and output head, are read from the target's folder, without the model around them.

Both protocols are implemented from their documentation and source and tested against a server that answers in that
form; neither was run on a real engine over several GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch
from transformers import AutoConfig

from driftwatch.errors import ModelError
from driftwatch.shadow.device import explain
from driftwatch.shadow.packing import Packed
from driftwatch.shadow.states.source import Read, Reduce
from driftwatch.shadow.weights import read_tensor

TIMEOUT = httpx.Timeout(120.0, connect=5.0)
ANSWER_BYTES = 1 << 30
"""Largest answer that is read."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
HEADS = ("lm_head.weight", "embed_out.weight")


class NotGivenError(ModelError):
    """The engine is well, but gives no hidden states for this sample."""


class Engine(Protocol):
    """One engine's way to answer."""

    url: str

    def hidden_states(self, ids: Sequence[int]) -> Iterator[torch.Tensor]:
        """The states of a prompt of token ids, [piece, values] in order; values are the layers one after the other.

        Raises NotGivenError if this prompt is refused, ModelError if the engine is away or answers in another form.
        """


class EngineStates:
    """A target served elsewhere; see :class:`driftwatch.shadow.states.source.States`. One prompt is asked for at a
    time, so that memory is bounded by the longest sample."""

    def __init__(
        self, folder: Path, engine: Engine, layers: Sequence[int], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """``folder`` is the target's, with config.json; ``layers`` are those that the engine was started with, as
        indices into ``hidden_states``. Raises ModelError if there is no readable configuration."""
        self._what = f"target {folder}"
        try:
            config: Any = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        except Exception as error:  # a broken configuration raises whatever the part that met it raises
            raise explain(error, self._what) from None
        self._folder, self._engine, self._config = folder, engine, config
        self.gives = tuple(layers)
        self.draft_device, self.dtype = device, dtype
        if max(self.gives) > self.layers or min(self.gives) < 0:
            raise ModelError(f"{self._what} has {self.layers} layers, hidden_states.layers says {list(self.gives)}")

    @property
    def url(self) -> str:
        return self._engine.url

    @property
    def hidden(self) -> int:
        return int(self._config.hidden_size)

    @property
    def layers(self) -> int:
        return int(self._config.num_hidden_layers)

    @property
    def token_ids(self) -> int:
        return int(self._config.vocab_size)

    @property
    def positions(self) -> int | None:
        return None  # the engine refuses what is too long

    @property
    def embedding(self) -> torch.Tensor:
        return self._table(EMBEDDINGS)

    @property
    def head_weight(self) -> torch.Tensor:
        return self._table(EMBEDDINGS if getattr(self._config, "tie_word_embeddings", False) else HEADS)

    def _table(self, endings: tuple[str, ...]) -> torch.Tensor:
        return read_tensor(self._folder, endings, self._what).to(self.draft_device, self.dtype)

    def probe(self) -> None:
        """Raises ModelError if the engine does not answer a short prompt as it should."""
        list(self._pieces([1, 2, 3]))

    def read(self, packed: Packed, layers: Sequence[int], reduce: Reduce, *, final: bool) -> Read:
        """As the protocol says; a NotGivenError concerns one sample of the batch, other ModelErrors all of them."""
        if final:
            raise ModelError(f"{self._what}: {self._engine.url} gives its hidden states, not its probabilities")
        order = [self.gives.index(layer) for layer in layers]
        found: torch.Tensor | None = None
        for b, length in enumerate(packed.lengths):
            start = 0
            for piece in self._pieces(packed.ids[b, :length].tolist()):
                kept = reduce([piece[None, :, i] for i in order])
                if found is None:
                    found = kept.new_zeros(*packed.ids.shape, kept.shape[-1])
                found[b, start : start + len(piece)] = kept[0]
                start += len(piece)
        assert found is not None
        return Read(found, None)

    def _pieces(self, ids: list[int]) -> Iterator[torch.Tensor]:
        """[piece, layers, hidden], as many rows as ids in all."""
        width, count, rows = self.hidden, len(self.gives), 0
        for piece in self._engine.hidden_states(ids):
            if piece.shape[1] != count * width:
                raise ModelError(
                    f"{self._engine.url} gives {piece.shape[1]} values a token, {count} layers (hidden_states.layers: "
                    f"{list(self.gives)}) of {width} are {count * width}; start it with those layers"
                )
            rows += len(piece)
            yield piece.view(len(piece), count, width).to(self.draft_device, self.dtype)
        if rows != len(ids):
            raise ModelError(
                f"{self._engine.url} gives hidden states of {rows} of {len(ids)} tokens; switch its prefix cache and "
                "chunked prefill off"
            )


def post(url: str, path: str, body: dict[str, Any]) -> bytes:
    """One request and its answer, of bounded size. Raises NotGivenError for a refusal or an answer too large,
    ModelError, one line, if the engine is not there, not well, or not this kind of engine."""
    try:
        with (
            httpx.Client(timeout=TIMEOUT, trust_env=False) as client,
            client.stream("POST", f"{url}{path}", json=body) as answer,
        ):
            content = bytearray()
            for block in answer.iter_bytes():
                content += block
                if len(content) > ANSWER_BYTES:
                    raise NotGivenError(f"{url}{path}: the answer is larger than {ANSWER_BYTES:,} bytes")
    except httpx.HTTPError as error:
        what = str(error) or type(error).__name__
        raise ModelError(f"{url}: {what}; is the engine running? (hidden_states.url)") from None
    if answer.status_code in (400, 413, 422):
        raise NotGivenError(f"{url}{path} answers {answer.status_code}")  # its body may repeat the prompt
    if answer.status_code != 200:
        raise ModelError(
            f"{url}{path} answers {answer.status_code}; a vLLM needs hidden_states.folder, an SGLang must have none"
        )
    return bytes(content)
