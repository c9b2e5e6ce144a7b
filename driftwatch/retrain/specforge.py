"""What SpecForge needs to train the draft further: its run configuration, and the commands around it.

Written for SpecForge 0.2.0: the keys are those of ``specforge/config/schema.py``, which refuses unknown ones. Training
on served tokens is its online mode: a patched SGLang captures the target's hidden states (``--enable-spec-capture``),
the trainer is another process, and Mooncake carries them from one to the other. What only the pipeline's operator knows
(its servers, its folders) stands as a name in capitals, to be replaced.
"""

from __future__ import annotations

import shlex
from typing import Any

import yaml

VERSION = "0.2.0"
TTT_LENGTH = 7
LEARNING_RATE = 2e-5
"""A fifth of SpecForge's default: the draft is trained already, and should keep what it knows."""

MAX_LENGTH = 4096
"""Longer rows are cut by SpecForge; what a GPU bears is for its operator to raise."""

CAPTURE_SERVER = "http://CAPTURE_SERVER:30000"
MOONCAKE_METADATA, MOONCAKE_MASTER = "http://MOONCAKE_SERVER:8080/metadata", "MOONCAKE_SERVER:50051"
"""Mooncake's own ports; without these addresses SpecForge plans no run."""
OUTPUT = "OUTPUT_DIR"
PLACEHOLDERS = ("OUTPUT_DIR", "CAPTURE_SERVER", "MOONCAKE_SERVER", "TARGET_SERVER", "CHAT_TEMPLATE")

# d2t and t2d are read by SpecForge from a torch file; a served draft holds them among its weights.
_MAPPING = (
    "import sys, torch; from safetensors.torch import load_file; "
    "w = load_file(sys.argv[1]); torch.save({k: w[k] for k in ('d2t', 't2d')}, sys.argv[2])"
)


def run_configuration(
    *, run_id: str, target: str, draft: str, strategy: str, max_length: int, aux_layers: list[int] | None
) -> str:
    """The YAML of one run: a warm start from the incumbent, on its own vocabulary mapping.

    Without the mapping SpecForge derives one from the new data, and the rows of the old head come to mean other tokens.
    """
    model: dict[str, Any] = {
        "target_model_path": target,
        "draft_model_config": f"{draft}/config.json",
        "draft_checkpoint_path": draft,
        "target_backend": "sglang",
    }
    if strategy == "eagle3":
        model["vocab_mapping_path"] = f"{OUTPUT}/vocab_mapping.pt"
    if aux_layers:
        model["aux_hidden_state_layer_ids"] = aux_layers
    run = {
        "run_id": run_id,
        "output_dir": OUTPUT,
        "model": model,
        "data": {"prompts_path": f"{OUTPUT}/train.jsonl", "max_length": max(max_length, 1)},
        "training": {
            "strategy": strategy,
            "num_epochs": 1,
            "batch_size": 1,
            "accumulation_steps": 1,
            "learning_rate": LEARNING_RATE,
            "ttt_length": TTT_LENGTH,
        },
        "deployment": {
            "mode": "disaggregated",
            "disaggregated": {
                "control_dir": f"{OUTPUT}/control",
                "backend": "mooncake",
                "server_urls": [CAPTURE_SERVER],
                "mooncake_metadata_server": MOONCAKE_METADATA,
                "mooncake_master_server_addr": MOONCAKE_MASTER,
            },
        },
    }
    return yaml.safe_dump(run, sort_keys=False)


def commands(*, run_id: str, target: str, draft: str, strategy: str, conversations: str | None) -> dict[str, str]:
    """Command lines by name, in the order in which they are run; ``regenerate`` where there are messages to answer."""
    run = f"{OUTPUT}/run.yaml"
    found: dict[str, list[str]] = {}
    if conversations is not None:
        answered = f"{OUTPUT}/regenerated.jsonl"
        found["regenerate"] = ["python", "scripts/regenerate_train_data.py", "--model", target]
        found["regenerate"] += ["--input-file-path", conversations, "--output-file-path", answered]
        found["regenerate"] += ["--server-address", "TARGET_SERVER:30000", "--concurrency", "64"]
        features = ["python", "scripts/prepare_hidden_states.py", "--target-model-path", target]
        features += ["--strategy", strategy, "--draft-model-config", f"{draft}/config.json"]
        features += ["--data-path", answered, "--output-path", f"{OUTPUT}/features", "--chat-template", "CHAT_TEMPLATE"]
        found["features"] = features
    mapping = ["--vocab-mapping", f"{OUTPUT}/vocab_mapping.pt"]
    if strategy == "eagle3":
        found["mapping"] = ["python", "-c", _MAPPING, f"{draft}/model.safetensors", mapping[1]]
    found["plan"] = ["specforge", "train", "-c", run, "--plan"]
    found["train"] = ["specforge", "train", "-c", run]
    found["export"] = ["specforge", "export", "--to", "sglang", "--checkpoint", f"{OUTPUT}/{run_id}-latest"]
    found["export"] += ["--draft-config", f"{draft}/config.json", "--output-dir", f"{OUTPUT}/draft"]
    found["export"] += mapping if strategy == "eagle3" else []
    return {name: shlex.join(words) for name, words in found.items()}
