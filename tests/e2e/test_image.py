"""The Dockerfile without a container engine: held against rules, and its steps run as commands.

Where it says /source and /opt/driftwatch, folders of this test are used. What runs in the image runs here as its user,
and where the test may mount one on a root file system that cannot be written. The packages of `shadow` are resolved
only.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.e2e.machine import free_port, until

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/Dockerfile"
PINS = ROOT / "deploy/constraints.txt"
UID = 10001


@dataclass
class Stage:
    """One FROM of the Dockerfile with what follows it."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [argument for name, argument in self.steps if name == instruction]


def read() -> dict[str, Stage]:
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    stages: dict[str, Stage] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        instruction, _, argument = line.partition(" ")
        if instruction == "FROM":
            base, _, name = argument.partition(" AS ")
            stages[name] = stage = Stage(base, name)
        else:
            stage.steps.append((instruction, argument.strip()))
    return stages


STAGES = read()


def inherited(name: str, instruction: str) -> list[str]:
    """An instruction's arguments in a stage and those that it is built on, the first one first."""
    stage = STAGES[name]
    return [*(inherited(stage.base, instruction) if stage.base in STAGES else []), *stage.all(instruction)]


def environment(name: str) -> dict[str, str]:
    pairs = [pair.partition("=") for argument in inherited(name, "ENV") for pair in shlex.split(argument)]
    return {key: value for key, _, value in pairs}


def test_bases_are_pinned_to_a_release() -> None:
    outside = {stage.base for stage in STAGES.values()} - set(STAGES)
    assert outside
    for base in outside:
        assert re.fullmatch(r"[a-z/.]+:\d+\.\d+\.\d+[\w.-]*", base), base


@pytest.mark.parametrize("target", ["tap-control", "shadow"])
def test_what_a_linter_asks_for(target: str) -> None:
    """hadolint's DL3002, DL3007, DL3013, DL3020, DL3025, DL3042, DL3055 and DL4003, as far as they apply."""
    assert inherited(target, "USER")[-1] == f"{UID}:{UID}"
    assert not inherited(target, "ADD")
    assert len(STAGES[target].all("CMD")) == len(STAGES[target].all("HEALTHCHECK")) == 1
    for argument in (*inherited(target, "CMD"), *inherited(target, "ENTRYPOINT")):
        assert isinstance(json.loads(argument), list), "the exec form: signals reach the process"
    (copied,) = inherited(target, "COPY")
    builder = re.match(r"--from=([\w-]+) (/opt/driftwatch) \2$", copied)
    assert builder, "nothing else of the build is in the image: no source, no pip cache"
    assert environment(builder[1])["PIP_NO_CACHE_DIR"] == "1"
    assert environment(builder[1])["PIP_CONSTRAINT"] == "/source/deploy/constraints.txt"


def test_images_and_manifests_agree() -> None:
    """The user, the ports and the processes."""
    base = [one for name in ("control", "shadow") for one in yaml.safe_load_all(manifest(name).read_text())]
    for deployment in (one for one in base if one["kind"] == "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        target = {"driftwatch": "tap-control", "driftwatch-shadow": "shadow"}[container["image"]]
        assert pod["securityContext"]["runAsUser"] == UID
        assert container["args"][0] == json.loads(STAGES[target].all("CMD")[0])[0]
        exposed = set(map(int, STAGES[target].all("EXPOSE")[0].split()))
        assert {port["containerPort"] for port in container["ports"]} <= exposed
        written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert environment(target)["TMPDIR"] in written
        assert environment(target)["HOME"] in written


def manifest(name: str) -> Path:
    return ROOT / f"deploy/kustomize/base/{name}.yaml"


class Image:
    """The target `tap-control`, built by its own steps in a folder that the image's user may read."""

    def __init__(self, folder: Path) -> None:
        self.source, self.venv, self.tmp = folder / "source", folder / "driftwatch", folder / "tmp"
        self.may_mount = False
        self.places = {"/source": str(self.source), "/opt/driftwatch": str(self.venv), "/tmp": str(self.tmp)}

    def here(self, text: str) -> str:
        return re.sub(r"/source|/opt/driftwatch|(?<![\w/])/tmp\b", lambda found: self.places[found[0]], text)

    def variables(self, stage: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_", "http", "no_"))}
        path = f"{self.venv}/bin:{Path(sys.executable).parent}:/usr/bin:/bin"
        return kept | {key: self.here(value) for key, value in environment(stage).items()} | {"PATH": path}

    def build(self) -> None:
        self.tmp.mkdir()
        for instruction, argument in STAGES["build"].steps:
            if instruction == "COPY":
                assert argument == ". ."
                context(self.source)
            elif instruction == "RUN":
                self.source.mkdir(exist_ok=True)
                self.run(argument, "build")

    def run(self, command: str, stage: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["sh", "-c", self.here(command)], cwd=self.source, env=self.variables(stage), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done

    def start(self, stage: str, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        """As its user; what lies outside of the volumes cannot be written."""
        command = [*json.loads(inherited(stage, "ENTRYPOINT")[-1]), *arguments]
        if os.geteuid() == 0:
            shutil.chown(self.tmp, UID, UID)
            as_user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--no-new-privs"]
            read_only = f'mount --bind {self.tmp} {self.tmp} && mount -o remount,bind,ro / && exec "$@"'
            isolated = ["unshare", "--mount", "sh", "-c", read_only, "sh"]
            self.may_mount = subprocess.run([*isolated, "true"], capture_output=True).returncode == 0
            command = [*(isolated if self.may_mount else []), *as_user, *command]
        with (self.tmp / f"{arguments[0]}.log").open("wb") as log:
            return subprocess.Popen(
                command, cwd=self.tmp, env=self.variables(stage) | variables, stdout=log, stderr=log
            )

    def healthy(self, stage: str, **variables: str) -> bool:
        check = json.loads(STAGES[stage].all("HEALTHCHECK")[0].partition(" CMD ")[2])
        return subprocess.run(check, env=self.variables(stage) | variables, capture_output=True).returncode == 0


def context(folder: Path) -> None:
    """What Docker would send: everything is left out but what the ignore file names."""
    everything, *rest = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().split()
    assert everything == "*"
    wanted = [line[1:] for line in rest if line.startswith("!")]
    assert [line for line in rest if not line.startswith("!")] == ["**/__pycache__"]
    for name in wanted:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    with tempfile.TemporaryDirectory(prefix="driftwatch-image-") as name:
        Path(name).chmod(0o755)
        one = Image(Path(name))
        one.build()
        yield one


def test_all_that_is_installed_is_pinned(image: Image) -> None:
    pins = dict(line.split("==") for line in PINS.read_text().splitlines()[1:])
    found = json.loads(image.run("pip list --format=json", "build").stdout)
    own = {"driftwatch-sidecar", "pip", "setuptools"}
    named = {re.sub(r"[-_.]+", "-", one["name"]).lower(): one["version"] for one in found}
    assert {name: pins.get(name) for name in named if name not in own} == {
        name: version for name, version in named.items() if name not in own
    }
    assert "torch" not in named


def test_the_shadows_packages_are_pinned_too(image: Image) -> None:
    """Resolved by its own step, against this registry's torch; nothing is installed."""
    (step,) = STAGES["build-shadow"].all("RUN")
    dry = step.replace("pip install", "pip install --quiet --dry-run --ignore-installed --report -")
    report = json.loads(image.run(dry, "build-shadow").stdout)
    pins = dict(line.split("==") for line in PINS.read_text().splitlines()[1:])
    named = {re.sub(r"[-_.]+", "-", one["metadata"]["name"]).lower() for one in report["install"]}
    assert {"torch", "transformers", "psycopg"} <= named
    assert {name for name in named - set(pins) if not re.match("nvidia-|cuda-|triton$", name)} == {"driftwatch-sidecar"}


@pytest.mark.parametrize("process", ["control", "tap"])
def test_it_runs_as_its_user_on_a_file_system_that_cannot_be_written(image: Image, process: str) -> None:
    ports = {name: free_port() for name in ("control", "metrics", "tap", "admin")}
    variables = {
        "DRIFTWATCH_CONTROL__LISTEN": f"127.0.0.1:{ports['control']}",
        "DRIFTWATCH_CONTROL__METRICS_LISTEN": f"127.0.0.1:{ports['metrics']}",
        "DRIFTWATCH_TAP__LISTEN": f"127.0.0.1:{ports['tap']}",
        "DRIFTWATCH_TAP__ADMIN": f"127.0.0.1:{ports['admin']}",
    }
    health = {"HEALTH_PORT": str(ports[{"control": "metrics", "tap": "admin"}[process]])}
    assert not image.healthy("tap-control", **health)
    (image.tmp / "settings.yaml").write_text("{}\n")
    running = image.start("tap-control", process, "--config", f"{image.tmp}/settings.yaml", **variables)
    try:
        log = image.tmp / f"{process}.log"
        until(lambda: image.healthy("tap-control", **health) or running.poll() is not None)
        assert running.poll() is None, log.read_text()
        if os.geteuid() == 0:
            assert f"\nUid:\t{UID}\t" in Path(f"/proc/{running.pid}/status").read_text()
            mounts = Path(f"/proc/{running.pid}/mountinfo").read_text()
            assert re.search(r" / / ro\b", mounts) or not image.may_mount
    finally:
        running.terminate()
        assert running.wait(60) in (0, -15), log.read_text()
