"""Chain drafts: any causal language model on the target's vocabulary, whole or cut.

A cut vocabulary carries an int64 tensor ``d2t`` [draft vocabulary] in its safetensors, the offset convention of
EAGLE-3 checkpoints: target id = draft id + d2t[draft id]. A token outside it can never be proposed, and is fed as the
draft id that config.json names as ``driftwatch_unk_id``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from driftwatch.acceptance import Rule, Weights
from driftwatch.errors import ModelError
from driftwatch.shadow.agreement import Agreement
from driftwatch.shadow.causal import PREFILL_TOKENS, Causal, load_model
from driftwatch.shadow.config import read_config
from driftwatch.shadow.draft import Fingerprint, Tokens, hash_weights
from driftwatch.shadow.figures import Figures, agreements, skip_reason, target_rows
from driftwatch.shadow.judge import VocabularyMap, judge, rows_at_once
from driftwatch.shadow.packing import Packed, pack
from driftwatch.shadow.target import NoTargetError, Target
from driftwatch.shadow.warp import Sampling
from driftwatch.shadow.weights import check_finite, read_tensors, tensor_names

MOST_IDS = 1 << 24
"""Token ids that a target may have, by far."""


class ChainDraft:
    """A small causal language model, replayed by one prefill; the target runs only where the rule or the agreement
    figures need its probabilities."""

    def __init__(
        self,
        model: Causal,
        to_target: torch.Tensor | None,
        unknown: int,
        fingerprint: Fingerprint,
        *,
        target: Target | None = None,
        rule: Rule = "argmax",
        agreement: bool = False,
    ) -> None:
        self.fingerprint, self.rule, self.agreement = fingerprint, rule, agreement
        self._model = model
        self._to_target = to_target
        self._unknown = unknown
        self._map = VocabularyMap(to_target, model.head.weight.device)
        self._target = target.model() if target is not None and (agreement or rule == "rejection") else None
        tables = [one.positions for one in (model, self._target) if one is not None and one.positions is not None]
        self._positions = min(tables, default=None)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        target: Target | None = None,
        rule: Rule = "argmax",
        agreement: bool = False,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> ChainDraft:
        """Load a checkpoint folder. Raises ModelError with one line if it is not a whole causal language model, or if
        what is asked for needs a target and there is none."""
        config = read_config(folder)
        sha256 = hash_weights(folder)
        if target is None and (agreement or rule == "rejection"):
            reason = "the rejection rule" if rule == "rejection" else "agreement"
            raise NoTargetError(f"draft {folder}: {reason} needs the target's probabilities; give the target's folder")
        model = load_model("draft", folder, device=device, dtype=dtype, ignored={"d2t"})
        check_finite(dict(model.named_parameters()), f"draft {folder}")
        causal = Causal(model, prefill_tokens=prefill_tokens)
        vocabulary = causal.vocabulary
        to_target = None
        if "d2t" in tensor_names(folder, f"draft {folder}"):
            to_target = _vocabulary_map(folder, vocabulary)
        parameters = sum(p.numel() for p in model.parameters())
        fingerprint = Fingerprint("chain", sha256, parameters, vocabulary, str(folder))
        unknown = config.index("driftwatch_unk_id") or 0
        if unknown >= vocabulary:
            raise ModelError(f"draft {folder}: driftwatch_unk_id is {unknown}, none of its {vocabulary} ids")
        return cls(causal, to_target, unknown, fingerprint, target=target, rule=rule, agreement=agreement)

    @property
    def mapped(self) -> bool:
        """Whether its ids are mapped to the target's, so that its vocabulary may be smaller."""
        return self._to_target is not None

    @property
    def described(self) -> str:
        """What it is, in words."""
        model = self._model
        ids = f"{model.vocabulary:,} of the target's ids, by d2t" if self.mapped else "the target's ids as they are"
        return f"{type(model.model).__name__}: hidden {model.hidden}, layers {model.layers}; proposes {ids}"

    def outside(self, ids: Sequence[int]) -> int:
        return self._map.outside(ids, self.fingerprint.vocabulary)

    def skip_reason(self, tokens: Tokens) -> str | None:
        limits = [] if self.mapped else [self.fingerprint.vocabulary]
        if self._target is not None:
            limits.append(len(self._target.embedding))
        return skip_reason(tokens, min(limits, default=None), self.rule, self._positions)

    def replay(self, batch: Sequence[Tokens]) -> list[Weights]:
        return [weights for weights, _ in self.measure(batch)]

    @torch.inference_mode()
    def measure(self, batch: Sequence[Tokens]) -> list[tuple[Weights, Agreement | None]]:
        """One forward pass over the padded batch; the head runs over judged rows alone.

        Padding is behind the tokens and attention is causal, so no row sees it.
        """
        packed = pack(batch)
        own = self._states(self._model, packed, self._draft_ids(packed.ids))
        theirs = None if self._target is None else self._states(self._target, packed, packed.ids)
        sampling = Sampling.of_batch(batch) if self.rule == "rejection" else None
        figures = Figures.empty(len(packed.served), 1, full=self.agreement)
        widest = max(model.vocabulary for model in (self._model, self._target) if model is not None)
        served = packed.served.to(own.device)
        for start in range(0, len(served), rows_at_once(widest)):
            rows = slice(start, min(start + rows_at_once(widest), len(served)))
            target = None
            if self._target is not None and theirs is not None:
                target = target_rows(self._target, theirs, served, sampling, rows, full=self.agreement)
                if self.agreement:
                    figures.surprise(rows, target, served[rows])
            logits = self._model.head(own[rows]) if target is None else self._model.logits(own[rows])
            settings_here = None if sampling is None else sampling[rows].to(own.device)
            verdicts = judge(logits, served[rows], self._map, rule=self.rule, target=target, sampling=settings_here)
            figures.put(torch.arange(rows.start, rows.stop), 0, verdicts)
        weights = [Weights(values) for values in packed.split(figures.weight)]
        if not self.agreement:
            return [(one, None) for one in weights]
        outside = self._map.draft_ids(served, self.fingerprint.vocabulary).cpu().numpy() < 0
        return list(zip(weights, agreements(packed, figures, outside), strict=True))

    def _states(self, model: Causal, packed: Packed, ids: torch.Tensor) -> torch.Tensor:
        """Last hidden states of the judged rows, [N, hidden]."""
        passes = model.prefill(ids.to(model.device))
        return packed.gather((start, last) for start, _, last in passes if last is not None)

    def _draft_ids(self, ids: torch.Tensor) -> torch.Tensor:
        if not self.mapped:
            return ids
        known = self._map.draft_ids(ids.to(self._model.device), self.fingerprint.vocabulary)
        return torch.where(known >= 0, known, self._unknown)


def _vocabulary_map(folder: Path, vocabulary: int) -> torch.Tensor:
    """[vocabulary] the target's ids of the draft's. Raises ModelError where d2t leads nowhere, or twice to one."""
    what = f"draft {folder}"
    d2t = read_tensors(folder, what)["d2t"]
    if tuple(d2t.shape) != (vocabulary,):
        raise ModelError(f"{what}: d2t has shape {list(d2t.shape)} for a vocabulary of {vocabulary}")
    ids = d2t.long() + torch.arange(vocabulary)
    if int(ids.min()) < 0 or int(ids.max()) >= MOST_IDS or len(set(ids.tolist())) < vocabulary:
        raise ModelError(
            f"{what}: d2t does not lead from its {vocabulary} ids to as many of the target's; target id = draft id + "
            "d2t[draft id] is the form that is read"
        )
    return ids
