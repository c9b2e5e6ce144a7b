"""What SpecForge needs to train the draft further: its run configuration, and the commands around it.

Written for SpecForge 0.2.0: the keys are those of ``specforge/config/schema.py``, which refuses unknown ones. Training
on served tokens is its online mode: a patched SGLang captures the target's hidden states (``--enable-spec-capture``),
the trainer is another process, and Mooncake carries them from one to the other. Without such servers it trains offline,
on features that ``driftwatch retrain features`` writes of the same rows. What only the pipeline's operator knows
(its servers, its folders) stands as a name in capitals, to be replaced.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from driftwatch.retrain import export

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
RUN, OFFLINE_RUN = "run.yaml", "run.offline.yaml"
"""Names of the two configurations, beside the rows of an export."""
ROWS, FEATURES = f"{OUTPUT}/{export.TRAIN}", f"{OUTPUT}/{export.FEATURES}"
PLACEHOLDERS = ("OUTPUT_DIR", "CAPTURE_SERVER", "MOONCAKE_SERVER", "TARGET_SERVER", "CHAT_TEMPLATE")

# d2t and t2d are read by SpecForge from a torch file; a served draft holds them among its weights.
_MAPPING = (
    "import sys, torch; from safetensors.torch import load_file; "
    "w = load_file(sys.argv[1]); torch.save({k: w[k] for k in ('d2t', 't2d')}, sys.argv[2])"
)

_ONLINE = {
    "mode": "disaggregated",
    "disaggregated": {
        "control_dir": f"{OUTPUT}/control",
        "backend": "mooncake",
        "server_urls": [CAPTURE_SERVER],
        "mooncake_metadata_server": MOONCAKE_METADATA,
        "mooncake_master_server_addr": MOONCAKE_MASTER,
    },
}


@dataclass(frozen=True)
class Run:
    """One run of a draft's training, by what is known here. ``target`` and ``draft`` are folders."""

    id: str
    target: str
    draft: str
    strategy: str
    aux_layers: Sequence[int] | None = None
    lm_head_key: str | None = None
    """Of the target's output head among its weights; None is SpecForge's default."""

    def files(self) -> dict[str, str]:
        """The configurations by the names that the commands give them."""
        return {RUN: self.configuration(), OFFLINE_RUN: self.configuration(offline=True)}

    def configuration(self, *, offline: bool = False) -> str:
        """The YAML: a warm start from the incumbent, on its own vocabulary mapping. Offline it reads features that were
        written before (``driftwatch retrain features``), and nothing but the draft is on the GPU.

        Without the mapping SpecForge derives one from the new data, and the rows of the old head come to mean other
        tokens.
        """
        model: dict[str, Any] = {
            "target_model_path": self.target,
            "draft_model_config": f"{self.draft}/config.json",
            "draft_checkpoint_path": self.draft,
            "target_backend": "sglang",
        }
        if self.strategy == "eagle3":
            model["vocab_mapping_path"] = f"{OUTPUT}/vocab_mapping.pt"
        if self.aux_layers:
            model["aux_hidden_state_layer_ids"] = list(self.aux_layers)
        if self.lm_head_key is not None:
            model["lm_head_key"] = self.lm_head_key
        source = {"hidden_states_path": FEATURES} if offline else {"prompts_path": ROWS}
        run = {
            "run_id": self.id,
            "output_dir": OUTPUT,
            "model": model,
            "data": source | {"max_length": MAX_LENGTH},
            "training": {
                "strategy": self.strategy,
                "num_epochs": 1,
                "batch_size": 1,
                "accumulation_steps": 1,
                "learning_rate": LEARNING_RATE,
                "ttt_length": TTT_LENGTH,
            },
            "deployment": {"mode": "local_colocated"} if offline else _ONLINE,
        }
        return yaml.safe_dump(run, sort_keys=False)

    def commands(self, conversations: str | None) -> dict[str, str]:
        """Command lines by name, in the order in which they are run; ``regenerate`` where there are messages to answer.

        ``features_of_rows`` and ``train_offline`` do in place of ``train`` where there is no server to capture from.
        """
        run = f"{OUTPUT}/{RUN}"
        config = f"{self.draft}/config.json"
        found: dict[str, list[str]] = {}
        if conversations is not None:
            answered = f"{OUTPUT}/regenerated.jsonl"
            found["regenerate"] = ["python", "scripts/regenerate_train_data.py", "--model", self.target]
            found["regenerate"] += ["--input-file-path", conversations, "--output-file-path", answered]
            found["regenerate"] += ["--server-address", "TARGET_SERVER:30000", "--concurrency", "64"]
            features = ["python", "scripts/prepare_hidden_states.py", "--target-model-path", self.target]
            features += ["--strategy", self.strategy, "--draft-model-config", config, "--data-path", answered]
            found["features"] = [*features, "--output-path", FEATURES, "--chat-template", "CHAT_TEMPLATE"]
        mapping = ["--vocab-mapping", f"{OUTPUT}/vocab_mapping.pt"]
        if self.strategy == "eagle3":
            found["mapping"] = ["python", "-c", _MAPPING, f"{self.draft}/model.safetensors", mapping[1]]
        found["plan"] = ["specforge", "train", "-c", run, "--plan"]
        found["train"] = ["specforge", "train", "-c", run]
        rows = ["driftwatch", "retrain", "features", "--data", ROWS, "--draft", self.draft]
        found["features_of_rows"] = [*rows, "--target", self.target, "--out", FEATURES]
        found["train_offline"] = ["specforge", "train", "-c", f"{OUTPUT}/{OFFLINE_RUN}"]
        served = "sglang" if self.strategy == "eagle3" else "hf"  # what SpecForge writes for engines, by kind of draft
        found["export"] = ["specforge", "export", "--to", served, "--checkpoint", f"{OUTPUT}/{self.id}-latest"]
        found["export"] += ["--draft-config", config, "--output-dir", f"{OUTPUT}/draft"]
        found["export"] += mapping if self.strategy == "eagle3" else []
        return {name: shlex.join(words) for name, words in found.items()}
