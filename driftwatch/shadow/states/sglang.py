"""Hidden states of SGLang's ``/generate``.

As of 0.5.23: the engine is started with ``--enable-return-hidden-states --enable-return-aux-hidden-states
--speculative-algorithm EAGLE3 --return-aux-hidden-state-layer-ids ...`` (which then drafts nothing itself) and
``--chunked-prefill-size -1``. The flag's ids are layer outputs, one lower than the ``hidden_states`` indices of the
settings. ``meta_info.hidden_states`` is a list of one matrix a prefill chunk, then one row a decoded token; each row
holds the layers one after the other. Rows of tokens found in the prefix cache are missing, so a key of its own keeps
every request out of it.

A row of three layers 4,096 wide is about 150 kB of JSON, so samples of more than some thousand tokens exceed the
largest answer that is read and are skipped: vLLM is the way for those.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

import numpy as np
import orjson
import torch

from driftwatch.errors import ModelError
from driftwatch.shadow.states.engine import post


class Sglang:
    """One SGLang instance at a base URL."""

    def __init__(self, url: str) -> None:
        self.url = url

    def hidden_states(self, ids: Sequence[int]) -> Iterator[torch.Tensor]:
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_hidden_states": True,
            "extra_key": uuid.uuid4().hex,
            "log_metrics": False,
        }
        answer = post(self.url, "/generate", body)
        left = len(ids)
        try:
            for part in orjson.loads(answer)["meta_info"]["hidden_states"]:
                rows = np.array(part, dtype=np.float32, ndmin=2)[:left]
                left -= len(rows)
                yield torch.from_numpy(rows)
        except (KeyError, TypeError, ValueError):
            raise ModelError(
                f"{self.url}/generate gives no meta_info.hidden_states; start it with --enable-return-hidden-states"
            ) from None
