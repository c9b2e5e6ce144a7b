"""Hidden states of vLLM's ``extract_hidden_states`` through its ExampleHiddenStatesConnector.

As of 0.33 (from 0.18 on): the engine is started with ``--no-enable-chunked-prefill``, the speculative method
``extract_hidden_states`` whose draft configuration names ``eagle_aux_hidden_state_layer_ids`` (``hidden_states``
indices, as in the settings), and a ``--kv-transfer-config`` of that connector with a ``shared_storage_path``. Each
request then leaves one safetensors file there, ``hidden_states`` [tokens, layers, hidden] and ``token_ids`` [tokens],
and is answered with its path. The file may be finished later: until then its writer holds an exclusive flock on
``path.lock``, which exists before the answer.

The folder is shared memory or a file system that both see. Files are deleted once read: they hold what users wrote.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError, safe_open

from driftwatch.errors import ModelError
from driftwatch.shadow.states.engine import post

PIECE = 16_384
"""Rows read from the file at a time."""
WRITING_S = 60.0
"""How long the file may take to appear after the answer."""
POLL_S = 0.02


class Vllm:
    """One vLLM instance at a base URL."""

    def __init__(self, url: str, folder: Path) -> None:
        """``folder`` is its ``shared_storage_path`` as seen from here."""
        self.url, self._folder = url, folder

    def hidden_states(self, ids: Sequence[int]) -> Iterator[torch.Tensor]:
        body = {"prompt": list(ids), "max_tokens": 1, "temperature": 0}
        answer = post(self.url, "/v1/completions", body)
        try:
            written = orjson.loads(answer)["kv_transfer_params"]["hidden_states_path"]
            path = self._folder / Path(written).name  # never outside the folder, whatever the answer says
        except (KeyError, TypeError, ValueError):
            raise ModelError(
                f"{self.url}/v1/completions gives no kv_transfer_params.hidden_states_path; start it with the method "
                "extract_hidden_states and the ExampleHiddenStatesConnector"
            ) from None
        lock = path.with_name(f"{path.name}.lock")
        try:
            yield from self._rows(path, lock, ids)
        finally:
            for file in (path, lock):
                file.unlink(missing_ok=True)

    def _rows(self, path: Path, lock: Path, ids: Sequence[int]) -> Iterator[torch.Tensor]:
        with self._opened(path, lock) as file:
            try:
                told, states = file.get_tensor("token_ids"), file.get_slice("hidden_states")
            except SafetensorError:
                raise ModelError(f"{path}: no hidden_states and token_ids in it; is it this connector's?") from None
            if told.tolist() != list(ids):
                raise ModelError(f"{path}: the hidden states are of other tokens than {self.url} was asked for")
            for start in range(0, len(ids), PIECE):
                yield states[start : start + PIECE].flatten(1)

    def _opened(self, path: Path, lock: Path) -> Any:
        """The file, once it is whole."""
        until = time.monotonic() + WRITING_S
        while True:
            try:
                if not _is_locked(lock):
                    return safe_open(path, "pt")
            except (OSError, SafetensorError):  # not there yet, or a file system without locks shows half of it
                pass
            if time.monotonic() > until:
                raise ModelError(
                    f"{path} is not there {WRITING_S:.0f} s after {self.url} answered; is {self._folder} its "
                    "shared_storage_path? (hidden_states.folder)"
                )
            time.sleep(POLL_S)


def _is_locked(path: Path) -> bool:
    import fcntl  # not on every platform that the rest runs on

    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:  # locks are off, or seen late: the file itself tells
        return False
    except BlockingIOError:
        return True
    return False
