"""Reading EAGLE-3 checkpoints of four trainers into one form, every tensor accounted for.

| origin | how it is known | layers read |
| --- | --- | --- |
| SpecForge | ``LlamaForCausalLMEagle3``, ``midlayer.`` | ``eagle_config`` ids are layer outputs: index + 1 |
| EAGLE | ``midlayer.`` under another architecture | the default |
| speculators | ``speculators_model_type`` | top-level ids are ``hidden_states`` indices |
| Model-Optimizer | ``LlamaForCausalLMEagle3``, ``layers.0.`` | as SpecForge |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.activations import ACT2FN

from driftwatch.errors import ModelError
from driftwatch.shadow.config import Config, read_config
from driftwatch.shadow.draft import hash_weights
from driftwatch.shadow.eagle3.spec import Eagle3Spec, Origin, Rope
from driftwatch.shadow.eagle3.vocabulary import read_map
from driftwatch.shadow.weights import read_tensors

TOP_LEVEL_IDS = "eagle_aux_hidden_state_layer_ids"

LINEAR = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
IGNORED = ("rotary_emb.inv_freq", "self_attn.rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
"""Computed anew, or used in training alone."""


@dataclass(frozen=True)
class Checkpoint:
    """A head as it lies on disk, normalised."""

    path: Path
    spec: Eagle3Spec
    tensors: Mapping[str, torch.Tensor]
    """On the CPU as stored, under these names: ``fc``, ``fc_norm.i``, ``input_norm``, ``self_attn.*``, ``mlp.*``, the
    layer's norms, ``norm``, ``lm_head``, ``embed_tokens``, each ``.weight`` (``.bias``)."""
    to_target: torch.Tensor | None
    """[Vd] absolute target ids; None where the draft has the whole vocabulary."""
    sha256: str
    inferred: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())


def is_eagle3(config: Config, names: set[str]) -> bool:
    """Whether a checkpoint folder holds an EAGLE-3 head, from its configuration and tensor names."""
    if "speculators_model_type" in config:
        return bool(config.get("speculators_model_type") == "eagle3")
    return config.architecture == "LlamaForCausalLMEagle3" or any(name.startswith("midlayer.") for name in names)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read an EAGLE-3 checkpoint folder. Raises ModelError, one line, naming what is missing, unknown or impossible."""
    what = f"draft {folder}"
    config = read_config(folder)
    sha256 = hash_weights(folder)
    stored = read_tensors(folder, what)
    if (folder / "hf_quant_config.json").exists() or "quantization_config" in config:
        raise ModelError(f"{what}: it is quantised; export the head unquantised (bf16 or fp16)")
    reader = _Reader(what, config, stored)
    return reader.read(folder, sha256)


class _Reader:
    """One reading: takes tensors out of what is stored, and remembers what it had to infer."""

    def __init__(self, what: str, config: Config, stored: dict[str, torch.Tensor]) -> None:
        self.what = what
        self.config = config
        self.left = dict(stored)
        self.taken: dict[str, torch.Tensor] = {}
        self.inferred: list[str] = []
        self.warnings: list[str] = []
        self.origin = _origin(config, set(stored))
        self.layer = config.part("transformer_layer_config") if self.origin == "speculators" else config
        self.eagle = config.part("eagle_config")

    def read(self, folder: Path, sha256: str) -> Checkpoint:
        config = self.config
        depth = self.layer.count("num_hidden_layers", 1)
        if depth != 1:
            raise ModelError(f"{self.what}: num_hidden_layers is {depth}; EAGLE-3 heads of one layer are supported")
        if not self.eagle.flag("use_aux_hidden_state", True):
            raise ModelError(f"{self.what}: use_aux_hidden_state is false: a head without target layers is not EAGLE-3")
        for name in LINEAR:
            self._take(f"{name}.weight")
            self._take(f"{name}.bias", needed=False)
        for name in NORMS:
            self._take(f"{name}.weight")
        projection = self._take("fc.weight")
        if projection is None or projection.ndim != 2:
            raise ModelError(f"{self.what}: tensor fc.weight is no matrix; is it a whole EAGLE-3 checkpoint?")
        self._take("fc.bias", needed=False)
        last_norm = self._last_norm()
        own_head = self._take("lm_head.weight", needed=False) is not None
        own_embedding = self._take("embed_tokens.weight", needed=False) is not None
        qk_norm = self._take("self_attn.q_norm.weight", needed=False) is not None
        if qk_norm:
            self._take("self_attn.k_norm.weight")
        aux = self._aux()
        fc_norm, norm_before_fc, count = self._norms_before_fc(aux)
        vocabulary = self._vocabulary(own_head)
        target_vocabulary = config.count("vocab_size", self.layer.count("vocab_size", vocabulary))
        to_target = read_map(
            self.left.pop("d2t", None), self.left.pop("t2d", None), vocabulary, target_vocabulary, self.what
        )
        ignored = [name for name in self.left if _short(name) in IGNORED]
        unknown = sorted(set(self.left) - set(ignored))
        if unknown:
            raise ModelError(f"{self.what}: {len(unknown)} tensors belong to no part of it, the first is {unknown[0]}")
        spec = self._spec(
            aux=aux,
            aux_count=count,
            fc_norm=fc_norm,
            norm_before_fc=norm_before_fc,
            qk_norm=qk_norm,
            last_norm=last_norm,
            vocabulary=vocabulary,
            target_vocabulary=target_vocabulary,
            own_embedding=own_embedding,
            own_head=own_head,
        )
        _check_shapes(spec, self.taken, self.what)
        notes = tuple(self.inferred), tuple(sorted(ignored)), tuple(self.warnings)
        return Checkpoint(folder, spec, self.taken, to_target, sha256, *notes)

    def _take(self, name: str, *, needed: bool = True) -> torch.Tensor | None:
        for prefix in ("", "midlayer.", "layers.0.", "model."):
            found = self.left.pop(prefix + name, None)
            if found is not None:
                self.taken[name] = found
                return found
        if needed:
            raise ModelError(f"{self.what}: tensor {name} is missing; is it a whole EAGLE-3 checkpoint?")
        return None

    def _last_norm(self) -> bool:
        wanted = self.eagle.flag("use_last_layernorm", True)
        found = self._take("norm.weight", needed=wanted) is not None
        if found and not wanted:
            self.inferred.append("norm.weight is not applied: eagle_config.use_last_layernorm is false")
        return wanted

    def _aux(self) -> tuple[int, ...] | None:
        """Target layers as hidden_states indices."""
        aux, outputs = self.config.indices(TOP_LEVEL_IDS), self.eagle.indices(TOP_LEVEL_IDS)
        if aux is not None:
            if outputs is not None and tuple(i + 1 for i in outputs) != aux:
                self.warnings.append(
                    f"the top-level layer ids {list(aux)} and those in eagle_config {list(outputs)}, which are layer "
                    "outputs and so one lower, do not name the same layers; the top-level ones are read, as vLLM does"
                )
            return aux
        if outputs is not None and self.origin in ("SpecForge", "Model-Optimizer"):
            aux = tuple(i + 1 for i in outputs)
            self.inferred.append(f"eagle_config ids {list(outputs)} are layer outputs: hidden_states {list(aux)}")
            self.warnings.append(
                "vLLM misreads this checkpoint: it takes eagle_config ids one layer too low (V1 runner) or ignores "
                f'them (V2 runner); add "{TOP_LEVEL_IDS}": {list(aux)} at the top level of the config.json it serves'
            )
            return aux
        self.inferred.append("no layer ids in config.json: the default layers, hidden_states [2, N/2, N-3]")
        return None

    def _norms_before_fc(self, aux: tuple[int, ...] | None) -> tuple[bool, bool, int]:
        """fc_norm, norm_before_fc, and how many target layers are read."""
        count = len(aux) if aux is not None else 3
        has_fc_norm = self._take("fc_norm.0.weight", needed=self.config.flag("fc_norm")) is not None
        if has_fc_norm:
            for i in range(1, count):
                self._take(f"fc_norm.{i}.weight")
        wanted = self.config.flag("norm_before_fc")
        has_input_norm = self._take("input_norm.weight", needed=wanted) is not None
        for flag, found in (("fc_norm", has_fc_norm), ("norm_before_fc", has_input_norm)):
            if found and not self.config.flag(flag):
                self.inferred.append(f"{flag}: its tensors are there, config.json does not say it")
                self.warnings.append(f"config.json lacks {flag}: true, so an engine would leave out a trained norm")
        return has_fc_norm, has_input_norm, count

    def _vocabulary(self, own_head: bool) -> int:
        named = self.config.index("draft_vocab_size")
        if own_head:
            rows = len(self.taken["lm_head.weight"])
            if named not in (None, rows):
                raise ModelError(f"{self.what}: draft_vocab_size is {named}, lm_head.weight has {rows} rows")
            return rows
        self.inferred.append("no lm_head.weight: the target's output head is used")
        offsets = self.left.get("d2t")
        return len(offsets) if offsets is not None else named or self.config.count("vocab_size")

    def _spec(
        self,
        *,
        aux: tuple[int, ...] | None,
        aux_count: int,
        fc_norm: bool,
        norm_before_fc: bool,
        qk_norm: bool,
        last_norm: bool,
        vocabulary: int,
        target_vocabulary: int,
        own_embedding: bool,
        own_head: bool,
    ) -> Eagle3Spec:
        hidden, joined = self.taken["fc.weight"].shape
        heads = self.layer.count("num_attention_heads")
        rows = int(self.taken["self_attn.q_proj.weight"].shape[0])
        head_dim = self.layer.count("head_dim", rows // heads)
        kv_heads = self.layer.count("num_key_value_heads", heads)
        norm_output = self.config.flag("norm_output")
        if norm_output:
            self.inferred.append(
                "norm_output: later depths are fed the normed output, as engines read it (a SpecForge before September "
                "2026 wrote the same flag for the plain form)"
            )
        if not own_embedding:
            self.inferred.append("no embed_tokens.weight: the target's embedding is used")
        return Eagle3Spec(
            origin=self.origin,
            hidden=int(hidden),
            target_hidden=int(joined) // aux_count,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary=vocabulary,
            target_vocabulary=target_vocabulary,
            eps=self.layer.real("rms_norm_eps", 1e-6),
            activation=self.layer.choice("hidden_act", "silu", ACT2FN),
            rope=Rope.from_config(self.layer),
            aux=aux,
            aux_count=aux_count,
            fc_norm=fc_norm,
            norm_before_fc=norm_before_fc,
            norm_before_residual=self.config.flag("norm_before_residual", self.origin == "speculators"),
            norm_output=norm_output,
            qk_norm=qk_norm,
            last_norm=last_norm,
            embedding="own" if own_embedding else "target",
            head="own" if own_head else "target",
            first_position=1 if self.origin == "speculators" else 0,
        )


def _origin(config: Config, names: set[str]) -> Origin:
    if "speculators_model_type" in config:
        return "speculators"
    if any(name.startswith("layers.0.") for name in names):
        return "Model-Optimizer"
    return "SpecForge" if config.architecture.endswith("Eagle3") else "EAGLE"


def _short(name: str) -> str:
    for prefix in ("midlayer.", "layers.0.", "model."):
        name = name.removeprefix(prefix)
    return name


def _check_shapes(spec: Eagle3Spec, tensors: Mapping[str, torch.Tensor], what: str) -> None:
    """Raises ModelError naming the first tensor whose shape contradicts the others or config.json."""
    h, q, kv = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    inner = int(tensors["mlp.gate_proj.weight"].shape[0])
    expected: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, spec.aux_count * spec.target_hidden),
        "self_attn.q_proj.weight": (q, 2 * h),
        "self_attn.k_proj.weight": (kv, 2 * h),
        "self_attn.v_proj.weight": (kv, 2 * h),
        "self_attn.o_proj.weight": (h, q),
        "mlp.gate_proj.weight": (inner, h),
        "mlp.up_proj.weight": (inner, h),
        "mlp.down_proj.weight": (h, inner),
        "lm_head.weight": (spec.vocabulary, h),
        "input_norm.weight": (spec.aux_count * spec.target_hidden,),
        "self_attn.q_norm.weight": (spec.head_dim,),
        "self_attn.k_norm.weight": (spec.head_dim,),
    }
    expected |= {f"{name}.weight": (h,) for name in (*NORMS, "norm")}
    expected |= {f"fc_norm.{i}.weight": (spec.target_hidden,) for i in range(spec.aux_count)}
    for name, shape in expected.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            found = list(tensors[name].shape)
            raise ModelError(f"{what}: tensor {name} has shape {found}, config.json and the others say {list(shape)}")
    if "embed_tokens.weight" in tensors and int(tensors["embed_tokens.weight"].shape[1]) != h:
        raise ModelError(f"{what}: tensor embed_tokens.weight is not {h} wide, as the head's hidden size is")
    if spec.heads % spec.kv_heads:
        raise ModelError(f"{what}: {spec.heads} attention heads do not share {spec.kv_heads} kv heads evenly")
