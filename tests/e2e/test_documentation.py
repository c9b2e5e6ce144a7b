"""The commands of the documentation: each is run here as it stands there, or by a test that is named here, or is in a
block marked as needing a cluster or a container engine, which no test has.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from driftwatch.settings import Settings, load
from tests.e2e.machine import CHAIN, DATA, Machine, prompts

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md", "dashboards/README.md")
MARKS = {"cluster", "container"}
"""What a block may need, behind ``sh``."""
PROGRAMS = {"amtool", "curl", "docker", "driftwatch", "kubectl", "make", "pip", "promtool", "python", "sh", "uvicorn"}
"""A line that begins with one of these is a command, in a block that does not say what it holds."""

ELSEWHERE = {
    "make demo": ("tests/e2e/test_demo.py", '"-m", "driftwatch", "demo"'),
    "make test": (".ci/run", "make test"),
    "pip install 'driftwatch-sidecar[shadow]'": ("tests/e2e/test_image.py", 'STAGES["build-shadow"].all("RUN")'),
    "driftwatch serve --config settings.yaml": ("tests/e2e/test_processes.py", 'machine.start("serve")'),
}
"""What takes too long to run twice, or does not end: the file that runs it, and what stands there."""
ANSWERS = {"driftwatch db check --config settings.yaml": 1}
"""Exit codes other than 0: the store is empty."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a document."""

    info: str
    lines: tuple[str, ...]

    @property
    def needs(self) -> set[str]:
        return set(self.info.split()[1:])

    def commands(self) -> Iterator[str]:
        """With their continuation lines, without what a comment says behind them."""
        if self.info and self.info.split()[0] != "sh":
            return
        for line in re.sub(r"\\\n\s*", "", "\n".join(self.lines)).splitlines():
            command = re.sub(r"(^|\s+)# .*$", "", line).strip()
            if command and (self.info or command.split()[0] in PROGRAMS):
                yield command


def blocks(document: str) -> list[Block]:
    found: list[Block] = []
    info, lines = None, []
    for line in (ROOT / document).read_text().splitlines():
        fence = re.fullmatch(r"\s*```(.*)", line)
        if fence is None:
            lines.append(line)
        elif info is None:
            info, lines = fence[1].strip(), []
        else:
            found.append(Block(info, tuple(lines)))
            info = None
    assert info is None, f"{document}: a block without end"
    return found


@pytest.fixture
def folder(machine: Machine) -> Path:
    """A checkout with the files that the commands name; an engine that answers; settings of it in settings.yaml."""
    machine.start_engine()
    for name in ("dashboards", "deploy", "driftwatch"):
        shutil.copytree(ROOT / name, machine.folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    renamed = [json.dumps(one | {"labels": {"tenant": one["labels"]["domain"]}}) for one in prompts()]
    for name in ("requests.jsonl", "history.jsonl"):
        (machine.folder / name).write_text("\n".join(renamed))
    for name, model in {"D": CHAIN, "path/to/draft": CHAIN, "T": DATA / "models" / "target"}.items():
        (machine.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (machine.folder / name).symlink_to(model)
    return machine.folder


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_is_run_or_says_what_it_needs(document: str, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "DRIFTWATCH_SHADOW__DEVICE": "cpu"}
    for block in blocks(document):
        assert block.needs <= MARKS or not list(block.commands()), block
        if block.needs:
            continue
        for command in block.commands():
            if command in ELSEWHERE:
                continue
            done = subprocess.run(
                ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == ANSWERS.get(command, 0), f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def test_what_is_run_elsewhere_is_run_there() -> None:
    known = {command for document in DOCUMENTS for block in blocks(document) for command in block.commands()}
    assert set(ANSWERS) | set(ELSEWHERE) <= known
    for command, (file, text) in ELSEWHERE.items():
        assert text in (ROOT / file).read_text(), command


def test_a_program_that_no_rule_knows_is_noticed() -> None:
    """Blocks that do not say what they hold are read by their first words, so those that look like commands are."""
    for document in DOCUMENTS:
        for block in blocks(document):
            unread = [line for line in block.lines if re.match(r"[a-z][\w./-]+ (-{1,2}\w|[\w./]+ --)", line)]
            if not block.info:
                assert [line for line in unread if line.split()[0] not in PROGRAMS] == []


def test_settings_in_the_documentation_are_settings(tmp_path: Path) -> None:
    read = 0
    for document in DOCUMENTS:
        for block in blocks(document):
            values = yaml.safe_load("\n".join(block.lines)) if block.info == "yaml" else None
            if values and set(values) & set(Settings.model_fields):
                (tmp_path / "settings.yaml").write_text(yaml.safe_dump(values))
                load(tmp_path / "settings.yaml")
                read += 1
    assert read
