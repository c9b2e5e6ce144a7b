"""Make the demo's draft, or train one further: `python -m driftwatch.demo.train --out DIR`.

A draft is a Llama of few layers over a part of the target's vocabulary, cut from the target and distilled on the
target's own answers. Beside its weights it keeps `d2t` (target id = draft id + d2t[draft id]).
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from driftwatch.demo.prompts import Kind, prompts
from driftwatch.demo.target import fetch_target
from driftwatch.errors import DriftwatchError

Progress = Callable[[str], None]

UNK_KEY = "driftwatch_unk_id"
UNK_TARGET_ID = 0  # <|endoftext|>, which never occurs inside a chat
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One prompt with its answer; `loss_mask` is 1 on the answer's tokens."""

    input_ids: list[int]
    loss_mask: list[int]

    def last(self, length: int) -> Row:
        return Row(self.input_ids[-length:], self.loss_mask[-length:])

    def positions(self) -> list[int]:
        """The positions that predict a token of the answer."""
        return [i for i in range(len(self.input_ids) - 1) if self.loss_mask[i + 1]]


@dataclass(frozen=True)
class Draft:
    model: Any
    target_ids: Tensor  # the target id of each draft id, ascending
    unk_id: int  # the draft id fed for tokens outside the draft's vocabulary

    def from_target_ids(self, vocabulary: int) -> Tensor:
        table = torch.full((vocabulary,), self.unk_id)
        table[self.target_ids] = torch.arange(len(self.target_ids))
        return table


def load_target(folder: Path) -> tuple[Any, Any]:
    """The target in bf16 and its tokenizer."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def answer(
    target: Any,
    tokenizer: Any,
    questions: Sequence[str],
    *,
    new_tokens: int = 48,
    batch: int = 32,
    progress: Progress = _log.info,
) -> list[Row]:
    """The target's greedy answers, each up to and with the end of its turn."""
    rows: list[Row] = []
    tokenizer.padding_side = "left"
    end = target.generation_config.eos_token_id
    for first in range(0, len(questions), batch):
        chats = [[{"role": "user", "content": text}] for text in questions[first : first + batch]]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            out = target.generate(**inputs, do_sample=False, max_new_tokens=new_tokens)
        width = inputs["input_ids"].shape[1]
        for prompt, kept, full in zip(inputs["input_ids"], inputs["attention_mask"], out, strict=True):
            rows.append(_row(prompt[kept.bool()].tolist(), full[width:].tolist(), end))
        progress(f"answered {len(rows)} of {len(questions)} prompts")
    return rows


def _row(prompt: list[int], reply: list[int], end: int) -> Row:
    if end in reply:
        reply = reply[: reply.index(end) + 1]
    return Row(prompt + reply, [0] * len(prompt) + [1] * len(reply))


def read_rows(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    return [Row(row["input_ids"], row["loss_mask"]) for row in rows]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({"input_ids": row.input_ids, "loss_mask": row.loss_mask}) + "\n")


def choose_vocabulary(rows: Sequence[Row], size: int) -> Tensor:
    """The most frequent tokens of the rows; spare places go to the lowest ids, a BPE's most common merges."""
    counts = Counter(token for row in rows for token in row.input_ids)
    ranked = [UNK_TARGET_ID, *(token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])))]
    chosen = set(ranked[:size])
    spare = (token for token in range(len(chosen) + size) if token not in chosen)
    return torch.tensor(sorted([*chosen, *(next(spare) for _ in range(size - len(chosen)))]))


def cut_draft(target: Any, target_ids: Tensor, layers: Sequence[int], neurons: int) -> Draft:
    """A draft of the target's given layers, each with its strongest `neurons` FFN neurons only."""
    unk = int((target_ids == UNK_TARGET_ID).nonzero())
    known = {int(token): draft_id for draft_id, token in enumerate(target_ids)}
    settings = target.config.to_dict() | {
        "vocab_size": len(target_ids),
        "num_hidden_layers": len(layers),
        "intermediate_size": neurons,
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "pad_token_id": None,
        "unk_token_id": None,
        "eos_token_id": known.get(target.generation_config.eos_token_id),
        UNK_KEY: unk,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    model.float()
    source = {name: value.float() for name, value in target.state_dict().items()}
    state = {"model.norm.weight": source["model.norm.weight"], EMBEDDING: _cut_rows(source[EMBEDDING], target_ids, unk)}
    for to, layer in enumerate(layers):
        prefix = f"model.layers.{layer}."
        weights = {name.removeprefix(prefix): value for name, value in source.items() if name.startswith(prefix)}
        state |= {f"model.layers.{to}.{name}": value for name, value in _thin(weights, neurons).items()}
    model.load_state_dict(state | {HEAD: state[EMBEDDING]})
    return Draft(model, target_ids, unk)


def _cut_rows(embedding: Tensor, target_ids: Tensor, unk: int) -> Tensor:
    outside = torch.ones(len(embedding), dtype=torch.bool)
    outside[target_ids] = False
    cut = embedding[target_ids].clone()
    cut[unk] = embedding[outside].mean(0)
    return cut


def _thin(weights: dict[str, Tensor], neurons: int) -> dict[str, Tensor]:
    gate, up, down = (weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    kept = (gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)).topk(neurons).indices.sort().values
    thin = {"mlp.gate_proj.weight": gate[kept], "mlp.up_proj.weight": up[kept], "mlp.down_proj.weight": down[:, kept]}
    return weights | thin


def save_draft(draft: Draft, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draft.model.config.dtype = torch.bfloat16
    draft.model.config.save_pretrained(folder)
    state = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in draft.model.state_dict().items()}
    del state[HEAD]  # tied to the embedding
    state["d2t"] = draft.target_ids - torch.arange(len(draft.target_ids))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def load_draft(folder: Path) -> Draft:
    """A draft in fp32, as training needs it."""
    state = load_file(folder / "model.safetensors")
    d2t = state.pop("d2t")
    config = LlamaConfig.from_pretrained(folder, local_files_only=True)
    model: Any = LlamaForCausalLM(config)
    model.float()
    model.load_state_dict(state | {HEAD: state[EMBEDDING]})
    return Draft(model, d2t + torch.arange(len(d2t)), getattr(config, UNK_KEY))


def target_states(target: Any, rows: Sequence[Row], batch: int = 16, progress: Progress = _log.info) -> list[Tensor]:
    """Per row, the target's last hidden states at the positions that predict the answer."""
    states: list[Tensor] = []
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        with torch.inference_mode():
            hidden = target.model(input_ids=_padded([row.input_ids for row in part])).last_hidden_state
        states += [hidden[i, row.positions()].clone() for i, row in enumerate(part)]
        progress(f"read {len(states)} of {len(rows)} answers")
    return states


def _padded(sequences: Sequence[Sequence[int]]) -> Tensor:
    """Right-padded, which needs no mask under causal attention."""
    width = max(len(ids) for ids in sequences)
    return torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in sequences])


def _batches(count: int, size: int, seed: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while True:
        while len(order) < size:
            order += torch.randperm(count, generator=generator).tolist()
        yield order[:size]
        order = order[size:]


def _rate(step: int, steps: int, warmup: int = 20) -> float:
    return min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.01)


def distil(
    draft: Draft,
    target: Any,
    rows: Sequence[Row],
    *,
    steps: int,
    rate: float = 2e-3,
    batch: int = 16,
    seed: int = 0,
    progress: Progress = _log.info,
) -> float:
    """Train the draft in place by KL on the target's logits over the draft's vocabulary; returns the last mean loss."""
    rows = [row for row in rows if row.positions()]
    if not rows:
        raise DriftwatchError("no row has an answer to train on")
    states = target_states(target, rows, progress=progress)
    head = target.get_output_embeddings().weight.detach()[draft.target_ids].float()
    table = draft.from_target_ids(target.config.vocab_size)
    model = draft.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    recent: list[float] = []
    for step, picked in zip(range(1, steps + 1), _batches(len(rows), batch, seed), strict=False):
        wanted = torch.cat([states[i] for i in picked]).float() @ head.T
        loss = _loss(model, table, [rows[i] for i in picked], wanted)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent = [*recent[-24:], loss.item()]
        if step % 25 == 0 or step == steps:
            progress(f"step {step} of {steps}: loss {sum(recent) / len(recent):.3f}")
    model.eval()
    return sum(recent) / max(len(recent), 1)


def _loss(model: Any, table: Tensor, rows: Sequence[Row], wanted: Tensor) -> Tensor:
    inputs = table[_padded([row.input_ids for row in rows])]
    hidden = model.model(input_ids=inputs).last_hidden_state
    picked = torch.cat([hidden[i, row.positions()] for i, row in enumerate(rows)])
    found = model.lm_head(picked).float().log_softmax(-1)
    return torch.nn.functional.kl_div(found, wanted.log_softmax(-1), reduction="batchmean", log_target=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m driftwatch.demo.train", description="Make the demo's draft.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the draft")
    parser.add_argument("--cache", type=Path, default=Path(".driftwatch-demo"), help="folder that keeps the target")
    parser.add_argument("--kinds", nargs="+", choices=["code", "chat"], default=["code"], help="prompts to train on")
    parser.add_argument("--answers", type=Path, help="train on these JSONL rows instead of answering prompts")
    parser.add_argument("--keep-answers", type=Path, help="write the generated answers here")
    parser.add_argument("--from", dest="start", type=Path, help="draft to train further, with its vocabulary")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-length", type=int, default=512, help="keep this many last tokens of each row")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 1], help="the target's layers to start from")
    parser.add_argument("--neurons", type=int, default=640, help="FFN neurons per layer")
    parser.add_argument("--threads", type=int, default=1)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    target, tokenizer = load_target(fetch_target(args.cache))
    if args.answers:
        rows = read_rows(args.answers)
    else:
        questions = [text for kind in args.kinds for text in prompts(cast(Kind, kind), "train")]
        rows = answer(target, tokenizer, questions)
    if args.keep_answers:
        write_rows(args.keep_answers, rows)
    rows = [row.last(args.max_length) for row in rows]
    if args.start:
        draft = load_draft(args.start)
    else:
        draft = cut_draft(target, choose_vocabulary(rows, args.vocabulary), args.layers, args.neurons)
    distil(draft, target, rows, steps=args.steps, rate=args.rate, batch=args.batch, seed=args.seed)
    save_draft(draft, args.out)


if __name__ == "__main__":
    main()
