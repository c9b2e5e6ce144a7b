"""What a replay costs beside its floor, measured in one run on the same tensors.

The floor of a chain draft is its bare backbone over the same padded tokens and its head over the judged rows. That of
an EAGLE-3 head is the target's bare backbone over the same padded tokens, and as many bare passes of the head over the
judged rows as depths are replayed: input norms, projections, attention over the context's keys, feed-forward, output
head and argmax, with nothing around them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from driftwatch.shadow.causal import Causal
from driftwatch.shadow.chain import ChainDraft
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.eagle3.checkpoint import Checkpoint
from driftwatch.shadow.eagle3.head import Eagle3Head
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.eagle3.spec import Eagle3Spec, Rope
from driftwatch.shadow.packing import Packed, pack
from driftwatch.shadow.replay import batches, replay
from driftwatch.shadow.target import Target


def head_for(model: Causal, vocabulary: int, seed: int = 0) -> Checkpoint:
    """A head of random weights, shaped as trainers shape it for a target: the target's widths, a cut vocabulary."""
    config = model.config
    h, inner = model.hidden, int(config.intermediate_size)
    heads, kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
    head_dim = int(getattr(config, "head_dim", None) or h // heads)
    full = len(model.embedding)
    spec = Eagle3Spec(
        origin="SpecForge",
        hidden=h,
        target_hidden=h,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        target_vocabulary=full,
        eps=1e-6,
        activation="silu",
        rope=Rope(10_000.0),
        aux=None,
    )
    shapes = {
        "fc": (h, 3 * h),
        "self_attn.q_proj": (heads * head_dim, 2 * h),
        "self_attn.k_proj": (kv_heads * head_dim, 2 * h),
        "self_attn.v_proj": (kv_heads * head_dim, 2 * h),
        "self_attn.o_proj": (h, heads * head_dim),
        "mlp.gate_proj": (inner, h),
        "mlp.up_proj": (inner, h),
        "mlp.down_proj": (h, inner),
        "lm_head": (vocabulary, h),
    }
    draws = torch.Generator().manual_seed(seed)
    tensors = {f"{name}.weight": 0.02 * torch.randn(shape, generator=draws) for name, shape in shapes.items()}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": torch.ones(h) for name in norms}
    members = torch.randperm(full, generator=draws)[:vocabulary].sort().values
    return Checkpoint(Path("random"), spec, tensors, members, "0")


def samples(total: int, *, prompt: int, output: int, vocabulary: int, seed: int = 0) -> list[Tokens]:
    """Random tokens in a realistic mix of lengths (log-normal, a factor of two), prompt:output as given."""
    rng = np.random.default_rng(seed)
    found: list[Tokens] = []
    while sum(one.length for one in found) < total:
        length = int(np.clip(np.exp(rng.normal(np.log(400), 0.7)), 40, 2000))
        split = max(1, length * prompt // (prompt + output))
        x = rng.integers(3, vocabulary, length).tolist()
        found.append(Tokens(x[:split], x[split:]))
    return found


def grouped(found: Sequence[Tokens], batch_tokens: int) -> list[list[Tokens]]:
    lengths = [one.length for one in found]
    return [[found[i] for i in batch] for batch in batches(range(len(found)), lengths, batch_tokens)]


def padding(found: Sequence[Tokens], batch_tokens: int) -> float:
    """Share of computed tokens that are padding."""
    padded = sum(max(one.length for one in batch) * len(batch) for batch in grouped(found, batch_tokens))
    return 1 - sum(one.length for one in found) / padded


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Wall-clock time on a GPU; on a CPU the process's own time (one thread), which other processes do not stretch."""
    if device.type != "cuda":
        start = time.process_time()
        run()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def fastest(runs: Sequence[Callable[[], Any]], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each, the best of some turns taken in rotation: what else the machine does hits all alike."""
    for run in runs:
        run()
    turns = [[seconds(run, device) for run in runs] for _ in range(repeats)]
    return [min(column) for column in zip(*turns, strict=True)]


@torch.inference_mode()
def bare_chain(model: Causal, packs: Sequence[Packed]) -> None:
    for packed in packs:
        ids = packed.ids.to(model.device)
        last = model.backbone(input_ids=ids, use_cache=False).last_hidden_state
        rows = last[packed.sample.to(last.device), packed.position.to(last.device)]
        for part in torch.split(rows, 4096):
            model.head(part).argmax(dim=-1)


@torch.inference_mode()
def bare_target(model: Causal, packs: Sequence[Packed]) -> None:
    for packed in packs:
        model.backbone(input_ids=packed.ids.to(model.device), use_cache=False)


class BareHead:
    """Passes of the head over judged rows with torch's own attention, on inputs that are all made beforehand."""

    def __init__(self, head: Eagle3Head, embedding: torch.Tensor, packs: Sequence[Packed]) -> None:
        self.head, self.inputs = head, []
        spec = head.spec
        for packed in packs:
            rows = len(packed.served)
            shape = (len(packed.ids), spec.kv_heads, packed.ids.shape[1], spec.head_dim)
            keys, values = (torch.randn(shape, device=head.device, dtype=head.dtype) for _ in range(2))
            hidden = torch.randn(rows, spec.hidden, device=head.device, dtype=head.dtype)
            embedded = embedding[packed.served.to(head.device) % len(embedding)]
            bounds = [
                (slice(start, stop), b, int(packed.position[start]), int(packed.position[stop - 1]))
                for b, (start, stop) in enumerate(zip(packed.bounds, packed.bounds[1:], strict=False))
            ]
            masks = [
                torch.arange(last, device=head.device) < torch.arange(first, last + 1, device=head.device)[:, None]
                for _, _, first, last in bounds
            ]
            self.inputs.append((hidden, embedded, keys, values, packed.position.to(head.device) - 1, bounds, masks))

    @torch.inference_mode()
    def run(self, depths: int) -> None:
        head, spec = self.head, self.head.spec
        for hidden, embedded, keys, values, positions, bounds, masks in self.inputs:
            out = hidden
            for _ in range(depths):
                query, _ = head.query(embedded, out, positions, keys=True)
                parts = []
                for (rows, b, _, last), mask in zip(bounds, masks, strict=True):
                    found = F.scaled_dot_product_attention(
                        query[None, :, rows],
                        keys[None, b, :, :last],
                        values[None, b, :, :last],
                        attn_mask=mask,
                        enable_gqa=spec.heads != spec.kv_heads,
                    )
                    parts.append(found[0].transpose(0, 1).reshape(found.shape[2], -1))
                out = head.finish(out, torch.cat(parts))
                for part in torch.split(out, 4096):
                    head.logits(part).argmax(dim=-1)


def chain_ratio(draft: ChainDraft, found: Sequence[Tokens], batch_tokens: int, repeats: int) -> dict[str, float]:
    model = draft._model
    packs = [pack(batch) for batch in grouped(found, batch_tokens)]
    whole, bare = fastest(
        [lambda: list(replay(draft, found, batch_tokens=batch_tokens)), lambda: bare_chain(model, packs)],
        model.device,
        repeats,
    )
    judged = sum(one.judged for one in found)
    return {"ratio": whole / bare, "replay_s": whole, "bare_s": bare, "judged_per_s": judged / whole}


def eagle3_ratio(
    draft: Eagle3Draft, target: Target, found: Sequence[Tokens], batch_tokens: int, repeats: int
) -> dict[str, float]:
    model = target.model()
    packs = [pack(batch) for batch in grouped(found, batch_tokens)]
    head = BareHead(draft.head, draft.embedding, packs)
    whole, backbone, passes = fastest(
        [
            lambda: list(replay(draft, found, batch_tokens=batch_tokens)),
            lambda: bare_target(model, packs),
            lambda: head.run(draft.depths),
        ],
        model.device,
        repeats,
    )
    judged = sum(one.judged for one in found)
    return {
        "ratio": whole / (backbone + passes),
        "replay_s": whole,
        "target_s": backbone,
        "head_s": passes,
        "judged_per_s": judged / whole,
    }


def assisted_rate(target: Target, assistant: Any, found: Sequence[Tokens], gamma: int) -> float:
    """Output tokens a second when the same requests are decoded again with transformers' assisted generation."""
    assistant.generation_config.num_assistant_tokens = gamma
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0
    model = target.model()
    taken, made = 0.0, 0
    for one in found:
        ids = torch.tensor([list(one.prompt)], device=model.device)

        def run(ids: torch.Tensor = ids, count: int = len(one.output)) -> None:
            model.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=assistant,
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )

        taken += seconds(run, model.device)
        made += len(one.output)
    return made / taken
