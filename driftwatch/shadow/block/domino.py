"""Domino (arXiv 2605.29707): a DFlash block whose logits are corrected by what its earlier slots proposed.

A recurrent unit reads the embeddings of the block's tokens from the anchor on. Its state after the token before a
proposal, joined to what came of the proposal's slot, gives an addition to the logits, but for the first
``pure_draft_prefix_len`` proposals. In a replay it reads the served tokens: a depth counts only where the proposals
before it were accepted. With ``shift_label`` slot j proposes x[a + 1 + j], without x[a + j] as in DFlash. The forward
pass is that of SpecForge 0.2.0 (``modeling/draft/domino.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch.nn import functional as F

from driftwatch.shadow.block.attention import Keys
from driftwatch.shadow.block.checkpoint import Checkpoint, Stored
from driftwatch.shadow.block.dflash import DFlashHead, DFlashSpec, take

CORRECTION = "embed_proj.2.weight"
"""[vocabulary, E]: an output head of its own, over the E numbers that the correction of a slot comes to."""


@dataclass(frozen=True)
class DominoSpec(DFlashSpec):
    """A block's, and how it is corrected."""

    prefix: int
    """Proposals that are not."""
    shifted: bool


def read(folder: Path) -> tuple[DominoSpec, Checkpoint]:
    """A SpecForge export. Raises ModelError, one line, naming what is missing, unknown or impossible."""
    stored = Stored(folder)
    # Early checkpoints kept the correction under a name of its own.
    stored.left = {name.removeprefix("logit_head."): value for name, value in stored.left.items()}
    block = take(stored, "domino")
    method = stored.config.part("dflash_config")
    hidden, vocabulary = stored.config.count("hidden_size"), stored.config.count("vocab_size")
    width, state = method.count("emb_dim"), method.count("gru_hidden_dim")
    stored.take("prefix_gru.weight_ih_l0", 3 * state, hidden)
    stored.take("prefix_gru.weight_hh_l0", 3 * state, state)
    stored.take("embed_proj.0.weight", width, hidden + state)
    stored.take(CORRECTION, vocabulary, width)
    shifted = method.flag("shift_label")
    if shifted:
        block = replace(block, reads=replace(block.reads, slots=block.block))
    known = {field.name: getattr(block, field.name) for field in fields(block)}
    return DominoSpec(**known, prefix=method.index("pure_draft_prefix_len") or 0, shifted=shifted), stored.close()


class DominoHead(DFlashHead):
    """A block's tensors and those of its correction, on one device."""

    def __init__(self, spec: DominoSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(spec, tensors)
        self._domino = spec
        self._project = tensors["embed_proj.0.weight"]
        weights = [tensors[f"prefix_gru.weight_{name}_l0"] for name in ("ih", "hh")]
        hidden, state = weights[0].shape[1], weights[1].shape[1]
        self._gru = torch.nn.GRU(hidden, state, bias=False, batch_first=True).to(weights[0])
        self._gru.load_state_dict(dict(zip(("weight_ih_l0", "weight_hh_l0"), weights, strict=True)))

    def propose(
        self, context: list[Keys], embedded: torch.Tensor, at: torch.Tensor, depths: int
    ) -> Iterator[torch.Tensor]:
        """Each joined to the numbers that the correcting output head reads, which stands beside the first."""
        first = 0 if self._domino.shifted else 1
        slots = self.block(context, embedded, at)[:, first : first + depths]
        depth = torch.arange(depths, device=at.device)
        served = embedded[(at[:, None] + depth).clamp(max=len(embedded) - 1)]  # behind the end no row is judged
        states, _ = self._gru(served)
        correction = F.silu(F.linear(torch.cat([slots, states], dim=-1), self._project))
        correction = correction * (depth >= self._domino.prefix)[:, None]
        yield from torch.cat([slots, correction], dim=-1).unbind(dim=1)
