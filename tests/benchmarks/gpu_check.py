"""Correctness and cost on a GPU, in under five minutes: python -m tests.benchmarks.gpu_check

A Llama-8B-shaped target and its EAGLE-3 head with random weights, made on the device: nothing is downloaded. ``--tiny``
runs the same path with small shapes, on a CPU too. Exit status 1 if a check or a bound fails; the report is one JSON
object on the last line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from driftwatch.shadow.causal import Causal
from driftwatch.shadow.chain import ChainDraft
from driftwatch.shadow.draft import Fingerprint, Tokens
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.target import Target
from tests.benchmarks.cost import chain_ratio, eagle3_ratio, head_for, padding, samples

DEPTHS = 7
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131_072,
    },
}


def random_model(shape: dict[str, Any], device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """Weights are drawn on the device, in its type: an 8B model in seconds."""
    make: Any = LlamaConfig
    build: Any = LlamaForCausalLM
    config = make(**shape, tie_word_embeddings=False, initializer_range=0.05)
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = build(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def explicit(draft: Eagle3Draft, sample: Tokens, start: int) -> list[float]:
    """The window at one start by itself: a sample cut so that its only full window is this one."""
    output = sample.output[start : start + DEPTHS + 1]
    (weights,) = draft.replay([replace(sample, prompt=[*sample.prompt, *sample.output[:start]], output=output)])
    found: list[float] = weights.values[0].tolist()
    return found


def correctness(target: Target, draft: Eagle3Draft, vocabulary: int) -> dict[str, Any]:
    """The same weights alone, in a batch and in pieces through a cache; differences are near-ties of 16-bit floats."""
    found = samples(3000, prompt=1, output=1, vocabulary=vocabulary, seed=1)
    sampled = [Tokens(one.prompt, one.output, temperature=0.8, top_p=0.95) for one in found]
    in_batch = np.concatenate([one.values.ravel() for one in draft.replay(sampled)])
    alone = np.concatenate([draft.replay([one])[0].values.ravel() for one in sampled])
    model, before = target.model(), target.model().prefill_tokens
    model.prefill_tokens = 128
    in_pieces = np.concatenate([draft.replay([one])[0].values.ravel() for one in sampled])
    model.prefill_tokens = before
    windows = [(one, start) for one in sampled[:4] for start in range(0, one.judged - DEPTHS, 17)]
    by_window = [explicit(draft, one, start) for one, start in windows]
    at = [draft.replay([one])[0].values[start].tolist() for one, start in windows]
    return {
        "weights": len(in_batch),
        "mean": float(in_batch.mean()),
        "batch_differs": float(np.abs(in_batch - alone).mean()),
        "pieces_differ": float(np.abs(in_pieces - alone).mean()),
        "windows_differ": float(np.abs(np.array(by_window) - np.array(at)).mean()),
    }


def long_sample(draft: Eagle3Draft, length: int, vocabulary: int, device: torch.device) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.integers(3, vocabulary, length).tolist()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    (weights,) = draft.replay([Tokens(x[:-500], x[-500:])])
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if device.type == "cuda" else None
    return {
        "tokens": length,
        "judged": weights.tokens,
        "seconds": time.perf_counter() - start,
        "peak_gib_over_weights": peak,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to prove the path without a GPU")
    tiny = parser.parse_args().tiny
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not tiny:
        print("no GPU here; --tiny proves the path on a CPU", file=sys.stderr)
        return 2
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = SHAPES["tiny" if tiny else "8b"]
    vocabulary, budget = shape["vocab_size"], 2048 if tiny else 16_384
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "shapes": "tiny" if tiny else "8b",
        "dtype": str(dtype),
        "torch": torch.__version__,
    }
    failed: list[str] = []

    def check(name: str, good: bool) -> None:
        print(f"{'ok' if good else 'FAILED':8}{name}", flush=True)
        if not good:
            failed.append(name)

    def bound(kind: str, share: tuple[int, int], ratio: float, limit: float) -> None:
        """Tiny shapes are all overhead: their ratios are printed, not judged."""
        text = f"{kind} {share[0]}:{share[1]}: {ratio:.3f} of its floor"
        check(text if tiny else f"{text} <= {limit}", tiny or ratio <= limit)

    started = time.perf_counter()
    target = Target.of(random_model(shape, device, dtype, 0), prefill_tokens=budget)
    target.model().check_logits()
    checkpoint = head_for(target.model(), 64 if tiny else 32_000)
    report["load_s"] = time.perf_counter() - started

    exact = correctness(target, Eagle3Draft(checkpoint, target, depths=DEPTHS, rule="rejection"), vocabulary)
    report["correctness"] = exact
    limit = 1e-5 if dtype == torch.float32 else 0.02
    for name in ("batch_differs", "pieces_differ", "windows_differ"):
        check(f"{name} {exact[name]:.2g} <= {limit}", exact[name] <= limit)

    draft = Eagle3Draft(checkpoint, target, depths=DEPTHS)
    report["eagle3"] = {}
    for share in ((4, 1), (1, 4)):
        found = samples(3000 if tiny else 60_000, prompt=share[0], output=share[1], vocabulary=vocabulary)
        figures = eagle3_ratio(draft, target, found, budget, 3)
        report["eagle3"][f"{share[0]}:{share[1]}"] = figures | {"padding": padding(found, budget)}
        bound("eagle3", share, figures["ratio"], 1.2)
    length = 2000 if tiny else 131_072
    report["long"] = long_sample(draft, length, vocabulary, device)
    check(f"a sample of {length} tokens: {report['long']['judged']} judged", report["long"]["judged"] == 499)

    small = random_model(shape | {"num_hidden_layers": 2 if tiny else 4}, device, dtype, 1)
    chain = ChainDraft(Causal(small), None, 0, Fingerprint("chain", "0", 0, vocabulary, "random"))
    report["chain"] = {}
    for share in ((4, 1), (1, 4)):
        found = samples(3000 if tiny else 60_000, prompt=share[0], output=share[1], vocabulary=vocabulary)
        figures = chain_ratio(chain, found, budget, 3)
        report["chain"][f"{share[0]}:{share[1]}"] = figures
        bound("chain", share, figures["ratio"], 1.15)
    report["total_s"] = time.perf_counter() - started
    report["failed"] = failed
    print(json.dumps(report))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
