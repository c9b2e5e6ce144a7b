"""A PostgreSQL of its own for a benchmark, as installed: with fsync, and nothing tuned."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def server() -> Iterator[tuple[str, int]]:
    """URL of an empty database, and the process id of the server."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or [Path(shutil.which("initdb") or "initdb")]
    with tempfile.TemporaryDirectory(prefix="driftwatch-benchmark-") as folder:
        prefix: list[str] = []
        if os.geteuid() == 0:  # the server refuses to run as root
            prefix = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
            shutil.chown(folder, "postgres", "postgres")

        def run(program: str, *arguments: str) -> None:
            command = [*prefix, str(found[-1].parent / program), "-D", f"{folder}/data", *arguments]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)

        run("initdb", "-U", "dw", "-A", "trust", "-E", "UTF8")
        options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c port=5432"
        run("pg_ctl", "-w", "-l", f"{folder}/log", "-o", options, "start")
        try:
            pid = int(Path(f"{folder}/data/postmaster.pid").read_text().split()[0])
            yield f"postgresql+psycopg://dw@localhost/postgres?host={folder}&port=5432", pid
        finally:
            run("pg_ctl", "-m", "immediate", "stop")


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, its children and those that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = sum(int(value) for value in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(cpu_s(int(child)) for child in children if Path(f"/proc/{child}").exists())
