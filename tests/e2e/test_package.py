"""The package as a user installs it: from a wheel, without torch, in a virtual environment of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import httpx
import pytest

from tests.e2e.machine import Machine, completion, prompts, until

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a virtual environment with the wheel and its plain dependencies."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    kept = shutil.ignore_patterns(".venv", ".git", ".*_cache", "tests", "__pycache__", ".hypothesis")
    shutil.copytree(ROOT, source, ignore=kept)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("driftwatch_sidecar-*.whl")
    venv.create(folder / "venv", with_pip=True)
    binaries = folder / "venv" / "bin"
    subprocess.run([str(binaries / "python"), "-m", "pip", "--quiet", "install", str(wheel)], check=True)
    return binaries


def run(installed: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(installed / "driftwatch"), *arguments], cwd=cwd, capture_output=True, text=True)


def test_torch_is_not_there(installed: Path) -> None:
    code = "import importlib.util as u; print([n for n in ('torch', 'transformers', 'safetensors') if u.find_spec(n)])"
    found = subprocess.run([str(installed / "python"), "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


def test_the_migrations_are_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    assert run(installed, "db", "check", cwd=tmp_path).returncode == 1
    assert run(installed, "db", "upgrade", cwd=tmp_path).returncode == 0
    checked = run(installed, "db", "check", cwd=tmp_path)
    assert (checked.returncode, checked.stdout.strip()) == (0, "sqlite:///driftwatch.db is up to date")


@pytest.mark.parametrize("command", [["shadow"], ["replay", "x.jsonl", "--draft", "d"]])
def test_what_needs_torch_says_so_in_one_line(installed: Path, tmp_path: Path, command: list[str]) -> None:
    done = run(installed, *command, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("which is not installed: pip install 'driftwatch-sidecar[shadow]'")
    assert len(done.stderr.strip().splitlines()) == 1


def test_tap_and_control_work_without_it(installed: Path, machine: Machine) -> None:
    machine.start_engine()
    program = str(installed / "driftwatch")
    machine.start("control", program, "control", "--config", str(machine.config))
    machine.wait_for(f"{machine.control}/readyz")
    machine.start("tap", program, "tap", "--config", str(machine.config))
    machine.wait_for(f"{machine.admin}/readyz")
    for record in prompts()[:10]:
        answer = httpx.post(f"{machine.tap}/v1/completions", json=completion(record, stream=True), timeout=30)
        assert answer.status_code == 200
    until(lambda: machine.metrics().get("driftwatch_samples_total") == 10)
