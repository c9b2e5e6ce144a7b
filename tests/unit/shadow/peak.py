"""A process of its own whose peak memory is what a replay took: python peak.py BATCH_TOKENS TOKENS [TOKENS ..]

Prints one JSON list, the growth in bytes after each sample over what a short one needed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from driftwatch.shadow import causal, judge
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.eagle3 import head
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.replay import replay
from driftwatch.shadow.target import Target
from tests.benchmarks.cost import head_for
from tests.benchmarks.gpu_check import random_model

DEPTHS, VOCABULARY = 3, 32_000
LOGITS, SCORES, MASK = 1 << 23, 1 << 20, 1 << 20
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 131_072,
}


def high_water() -> int:
    """Peak resident bytes of this program; getrusage would begin with those of the process that started it."""
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


def main(batch_tokens: int, lengths: list[int]) -> list[int]:
    torch.set_num_threads(1)
    judge.LOGIT_ELEMENTS, head.SCORE_ELEMENTS, causal.MASK_ELEMENTS = LOGITS, SCORES, MASK  # small samples fill them
    target = Target.of(random_model(SHAPE, torch.device("cpu"), torch.float32, 0), prefill_tokens=batch_tokens)
    draft = Eagle3Draft(head_for(target.model(), VOCABULARY // 2), target, depths=DEPTHS)
    rng = np.random.default_rng(0)

    def peak(tokens: int) -> int:
        ids = rng.integers(0, VOCABULARY, tokens).tolist()
        (result,) = replay(draft, [Tokens(ids[: tokens // 2], ids[tokens // 2 :])], batch_tokens=batch_tokens)
        assert result.weights is not None
        assert result.weights.tokens == tokens - tokens // 2 - 1
        return high_water()

    before = peak(60)
    return [peak(tokens) - before for tokens in lengths]


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), [int(one) for one in sys.argv[2:]])))
