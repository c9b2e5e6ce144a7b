"""Which target and which draft exactly: paths, and hashes of the small files that decide how they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from driftwatch.economics.shape import Shape, split_draft

SMALL = {
    "config_sha256": "config.json",
    "tokenizer_sha256": "tokenizer.json",
    "chat_template_sha256": "chat_template.jinja",
}

STRATEGIES = {"DFlashDraftModel": "dflash", "DominoDraftModel": "domino"}
"""By ``architectures`` of a draft's config.json, beside EAGLE-3 with its several."""
TIED = "model.embed_tokens.weight"
"""The output head of a target that has none of its own."""


def target(path: str | None, facts: Mapping[str, Any]) -> dict[str, Any]:
    """A target by what its deployment is known for, and by its folder where control can read it."""
    config = _config(path)
    return {
        "path": path,
        "model": facts.get("target"),
        "revision": facts.get("target_revision"),
        "dtype": facts.get("dtype") or config.get("dtype") or config.get("torch_dtype"),
        "quantisation": facts.get("quantization") or config.get("quantization_config"),
        "vocab_size": config.get("vocab_size"),
        "layers": config.get("num_hidden_layers"),
        "lm_head_key": None if not config else TIED if config.get("tie_word_embeddings") else "lm_head.weight",
    } | _hashes(path)


def draft(path: str | None, facts: Mapping[str, Any], sha256: str | None) -> dict[str, Any]:
    """A draft; ``sha256`` is the hash of its weights and config, by which replays know it. Of an EAGLE-3 head as a tree
    (``path/to/head:steps=5,topk=4,tokens=8``) the path is the head's."""
    path, tree = _split(path)
    config = _config(path)
    layers = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return {
        "path": path,
        "tree": tree,
        "revision": facts.get("draft_revision"),
        "sha256": sha256,
        "strategy": strategy(config),
        "architectures": config.get("architectures"),
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        "draft_vocab_size": config.get("draft_vocab_size"),
        "aux_hidden_state_layer_ids": layers,
        "layer_id_convention": "0-based layer output" if layers else None,
    } | _hashes(path)


def _split(path: str | None) -> tuple[str | None, str | None]:
    """Folder and tree, here or on another machine."""
    tree = Shape.of_draft(path or "")
    if path is None or tree is None or Path(path).exists():
        return path, None
    return split_draft(path)[0], str(tree)


def strategy(config: Mapping[str, Any]) -> str | None:
    """SpecForge's name for this kind of draft; None for a kind that it does not train, or (P-EAGLE) only with a mapping
    of vocabularies that not every such draft holds."""
    names = config.get("architectures") or []
    if any("Eagle3" in name for name in names) or "draft_vocab_size" in config:
        return None if "PEagleDraftModel" in names else "eagle3"
    return next((STRATEGIES[name] for name in names if name in STRATEGIES), None)


def _config(path: str | None) -> dict[str, Any]:
    try:
        found = json.loads((Path(path) / "config.json").read_text()) if path else {}
    except (OSError, ValueError):  # a path of another machine, or no folder: nothing is known
        return {}
    return found if isinstance(found, dict) else {}


def _hashes(path: str | None) -> dict[str, str | None]:
    return {key: _hash(Path(path) / name) if path else None for key, name in SMALL.items()}


def _hash(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None
