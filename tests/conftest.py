"""What every test may use: settings free of the caller's environment, and both databases."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from driftwatch.store import migrate
from driftwatch.store.connection import Store

DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("DRIFTWATCH_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL of a throwaway PostgreSQL server's maintenance database.

    Not in pytest's own folder, which no other user may enter, and the server runs as one.
    """
    with tempfile.TemporaryDirectory(prefix="driftwatch-postgres-") as name:
        server = _PostgresServer(Path(name))
        server.start()
        yield f"postgresql://dw@localhost/postgres?host={name}&port={server.PORT}"
        server.stop()


class _PostgresServer:
    """Reached through a socket in its folder alone, so that no port can be taken."""

    PORT = 5432

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or [Path(shutil.which("initdb") or "initdb")]
        self.bin = found[-1].parent
        self.prefix: list[str] = []
        if os.geteuid() == 0:  # the server refuses to run as root
            self.prefix = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
            shutil.chown(folder, "postgres", "postgres")

    def start(self) -> None:
        self._run("initdb", "-D", str(self.folder / "data"), "-U", "dw", "-A", "trust", "--no-sync", "-E", "UTF8")
        options = f"-c listen_addresses='' -c unix_socket_directories={self.folder} -c port={self.PORT} -c fsync=off"
        log = str(self.folder / "log")
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-l", log, "-o", options, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self.prefix, str(self.bin / program), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=self.folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty database, of each kind in turn."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'driftwatch.db'}"
        return
    server: str = request.getfixturevalue("postgres")
    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    yield server.replace("postgresql://", "postgresql+psycopg://").replace("/postgres?", f"/{name}?")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """A migrated store on each database in turn."""
    store = Store(store_url)
    migrate.upgrade(store)
    yield store
    store.close()


@pytest.fixture
def sqlite_store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'driftwatch.db'}")
    migrate.upgrade(store)
    yield store
    store.close()
