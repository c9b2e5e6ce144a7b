"""The run configuration and the data, read by SpecForge's own code where it is installed (0.2.0, without its needs)."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from driftwatch.retrain.export import FEATURES, TRAIN
from driftwatch.retrain.specforge import PLACEHOLDERS, VERSION, Run

MODELS = Path(__file__).parents[2] / "data" / "models"


def specforge(module: str) -> ModuleType:
    reason = f"{module} of SpecForge {VERSION} cannot be imported: not checked (pip install --no-deps specforge)"
    found: ModuleType = pytest.importorskip(module, reason=reason, exc_type=ImportError)
    return found


def run(strategy: str = "eagle3", *, offline: bool = False, **more: Any) -> str:
    return Run("retrain-1", "/t", "/d", strategy, [1, 9, 17], **more).configuration(offline=offline)


def commands(conversations: str | None = None, draft: str = "/d") -> dict[str, str]:
    return Run("r", "/t", draft, "eagle3").commands(conversations)


def test_specforge_reads_the_run_configuration(tmp_path: Path) -> None:
    config = specforge("specforge.config")
    (tmp_path / "run.yaml").write_text(run())
    read: Any = config.load_config(str(tmp_path / "run.yaml"))
    assert (read.mode, read.training.strategy, read.training.role) == ("online", "eagle3", "auto")
    assert (read.model.draft_checkpoint_path, read.training.resume_from) == ("/d", None)
    assert read.model.vocab_mapping_path == "OUTPUT_DIR/vocab_mapping.pt"
    assert read.model.aux_hidden_state_layer_ids == [1, 9, 17]


@pytest.mark.parametrize("strategy", ["eagle3", "dflash", "domino"])
@pytest.mark.parametrize("offline", [False, True])
def test_specforge_plans_the_run(tmp_path: Path, strategy: str, offline: bool) -> None:
    """The command line that is told, once the names in capitals are replaced."""
    specforge("specforge.launch_plan")
    layers = [1, 3, 4] if strategy == "eagle3" else None
    one = Run("r", str(MODELS / "target"), str(MODELS / strategy), strategy, layers, "lm_head.weight")
    text = (
        one.configuration(offline=offline).replace("CAPTURE_SERVER", "capture").replace("MOONCAKE_SERVER", "mooncake")
    )
    name = "run.offline.yaml" if offline else "run.yaml"
    (tmp_path / name).write_text(text.replace("OUTPUT_DIR", str(tmp_path)))
    line = one.commands(None)["train_offline"] + " --plan" if offline else one.commands(None)["plan"]
    words = shlex.split(line.replace("OUTPUT_DIR", str(tmp_path)))
    command = [sys.executable, "-m", "specforge.cli", *words[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert [worker["label"] for worker in plan["commands"]] == ([] if offline else ["producer", "consumer"])
    assert plan["role"] == ("all" if offline else "both")


def test_without_a_server_the_run_reads_the_features_that_its_command_writes(tmp_path: Path) -> None:
    text = run(offline=True, lm_head_key="model.embed_tokens.weight")
    (tmp_path / "run.offline.yaml").write_text(text)
    read: Any = specforge("specforge.config").load_config(str(tmp_path / "run.offline.yaml"))
    assert (read.mode, read.training.role) == ("offline", "all")
    assert read.model.lm_head_key == "model.embed_tokens.weight"
    features = shlex.split(commands()["features_of_rows"])
    assert read.data.hidden_states_path == features[features.index("--out") + 1]


def test_specforge_reads_the_rows(tmp_path: Path) -> None:
    builder = specforge("specforge.data.prompt_builder")
    row = {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 1]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row, separators=(",", ":")) + "\n")
    tasks = builder.prepare_prompt_tasks(
        str(tmp_path / "train.jsonl"),
        None,
        chat_template=None,
        max_length=2048,
        is_preformatted=False,
        train_only_last_turn=False,
        cache_dir=None,
        cache_key=None,
        num_proc=None,
    )
    assert [task["payload"] for task in tasks] == [row]


def test_a_warm_start_keeps_the_old_vocabulary_mapping() -> None:
    found = yaml.safe_load(run())
    assert found["model"]["draft_checkpoint_path"] == "/d"
    lines = commands()
    assert list(lines) == ["mapping", "plan", "train", "features_of_rows", "train_offline", "export"]
    assert shlex.split(lines["mapping"])[-2:] == ["/d/model.safetensors", found["model"]["vocab_mapping_path"]]
    assert found["model"]["vocab_mapping_path"] in shlex.split(lines["export"])
    assert "vocab_mapping_path" not in yaml.safe_load(run("dflash"))["model"]


def test_where_messages_are_known_answers_can_be_generated_anew() -> None:
    lines = commands("file:///c.jsonl", "/d e")
    assert list(lines)[:2] == ["regenerate", "features"]
    assert "/d e/config.json" in shlex.split(lines["features"])


def test_the_commands_name_the_files_that_are_written() -> None:
    one = Run("r", "/t", "/d", "eagle3")
    lines = one.commands(None)
    read = {name: shlex.split(lines[name])[3].removeprefix("OUTPUT_DIR/") for name in ("train", "train_offline")}
    found = {name: yaml.safe_load(one.files()[file])["data"] for name, file in read.items()}
    assert found["train"]["prompts_path"] == f"OUTPUT_DIR/{TRAIN}"
    assert found["train_offline"]["hidden_states_path"] == f"OUTPUT_DIR/{FEATURES}"
    rows = shlex.split(lines["features_of_rows"])
    assert rows[rows.index("--data") + 1] == found["train"]["prompts_path"]


def test_every_name_in_capitals_is_told() -> None:
    everything = run() + "".join(commands("c").values())
    for name in PLACEHOLDERS:
        assert name in everything


def test_the_mapping_command_does_what_it_says(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    draft = MODELS / "eagle3"
    line = commands(draft=str(draft))["mapping"]
    words = shlex.split(line.replace("OUTPUT_DIR", str(tmp_path)))
    code = compile(words[2], "mapping", "exec")

    saved = sys.argv
    sys.argv = ["-c", *words[3:]]
    try:
        exec(code, {})
    finally:
        sys.argv = saved
    found = torch.load(tmp_path / "vocab_mapping.pt", weights_only=True)
    assert set(found) == {"d2t", "t2d"}
    assert int(found["t2d"].sum()) == len(found["d2t"])
