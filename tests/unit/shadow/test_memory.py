"""Memory of a replay is bounded by the settings and not by the sample, up to samples of 131,072 tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.replay import replay
from driftwatch.shadow.target import Target
from tests.benchmarks.cost import head_for
from tests.benchmarks.gpu_check import random_model

from . import peak

LENGTHS = (2000, 8000)
MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("batch_tokens", [512, 1024])
def test_peak_of_a_process(batch_tokens: int) -> None:
    """A block of logits, three of scores, and the target's mask of one pass over the cache, twice (it comes as
    booleans and is turned into floats); a quarter on top for the rest. A sample four times as long stays under it;
    positions x depths x vocabulary alone would be a multiple. The blocks are smaller here than usual. What is freed
    goes back at once, or the peak would be of what the C library keeps for later, which varies twofold."""
    arguments = [str(batch_tokens), *map(str, LENGTHS)]
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, str(Path(peak.__file__)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | at_once)
    short, long = json.loads(done.stdout.splitlines()[-1])
    bound = 1.25 * 4 * (peak.LOGITS + 3 * peak.SCORES + 2 * peak.MASK)
    naive = 4 * LENGTHS[1] // 2 * peak.DEPTHS * peak.VOCABULARY // 2
    print(f"{short / MIB:.0f} and {long / MIB:.0f} MiB, bound {bound / MIB:.0f}, naive {naive / MIB:.0f}")
    assert short > 4 * peak.LOGITS  # it did fill its blocks
    assert long <= bound < naive
    assert long < 1.5 * short


@pytest.mark.timeout(900)
def test_a_sample_of_131072_tokens() -> None:
    """Through the cache in pieces."""
    shape = peak.SHAPE | {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    model = random_model(shape | {"num_attention_heads": 1}, torch.device("cpu"), torch.float32, 0)
    target = Target.of(model, prefill_tokens=2048)
    checkpoint = head_for(target.model(), 20)
    checkpoint = replace(checkpoint, spec=replace(checkpoint.spec, aux=(0, 1, 1)))
    draft = Eagle3Draft(checkpoint, target, depths=3)
    ids = np.random.default_rng(0).integers(0, 64, 131_072).tolist()
    (result,) = replay(draft, [Tokens(ids[:-200], ids[-200:])], batch_tokens=2048)
    assert result.skipped is None
    assert result.weights is not None
    assert result.weights.values.shape == (199, 3)
    assert 0 < result.weights.values.mean() < 0.5
