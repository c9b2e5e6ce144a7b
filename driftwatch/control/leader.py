"""Which control leads: of several on one PostgreSQL one judges, decides, delivers and exports; all take samples and are
read. On SQLite there is only one.

To lead is to hold an advisory lock on a connection of its own (PostgreSQL 15, sections 13.3.5 and 9.27.10). The server
lets go of it when that connection ends, or says nothing for ``SILENT_S``: so a leader that was killed, cut off or
stopped loses it, and one that hears nothing from the server stops leading as soon.

A leader that does not know yet that it was replaced can write nothing: each of its transactions shares a second lock
and then looks whether it still holds the first. Whoever takes over ends the sessions that share it, so that what was in
flight is rolled back, and begins when there is none left. What a transaction holds therefore happens once.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from driftwatch.errors import DriftwatchError
from driftwatch.store.connection import Store

log = logging.getLogger(__name__)

CHECK_S = 2.0
"""Seconds between two looks, of the leader and of those who would follow it."""
SILENT_S = 8
"""Seconds without a word from the leader after which the server ends its session."""

LEADER = "hashtextextended('driftwatch:leader', 0)"
TERM = "hashtextextended('driftwatch:term', 0)"
HELD = (  # a 64-bit key is shown in two halves
    "FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND (classid::bigint << 32 | objid::bigint) = "
)


class Superseded(DriftwatchError):
    """Another control leads now; nothing of the transaction was stored."""


class Leader:
    """Takes part in the choice while it runs. ``store`` is what a leader's work is to be written through."""

    def __init__(self, store: Store) -> None:
        self._alone = store.url.get_backend_name() == "sqlite"
        self._store = store
        self.store = store if self._alone else store.checked(self._check)
        self._connection: sa.Connection | None = None
        self._pid = 0
        self._until = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leader", daemon=True)

    @property
    def leads(self) -> bool:
        return self._alone or time.monotonic() < self._until

    def start(self) -> None:
        """Look once, so that a control without others leads from the first moment on, and then again and again."""
        if not self._alone:
            self.look()
            self._thread.start()

    def stop(self) -> None:
        """Give the lead away at once."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._until = 0.0
        if self._connection is not None:
            with suppress(SQLAlchemyError):
                self._connection.execute(sa.text("SELECT pg_advisory_unlock_all()"))
        self._let_go()

    def _run(self) -> None:
        while not self._over.wait(CHECK_S):
            self.look()

    def look(self) -> None:
        """Keep the lead, take it if nobody has it, or learn that it is lost."""
        led, now = self.leads, time.monotonic()
        try:
            if self._holds():
                self._until = now + SILENT_S
        except SQLAlchemyError as error:
            self._let_go()
            if led:
                log.warning("the store does not answer: %s", str(error).splitlines()[0])
        if led != self.leads:
            log.warning("this control leads %s", "now" if self.leads else "no longer")

    def _holds(self) -> bool:
        """Whether the lock is ours, taken just now or before."""
        if self._connection is None:
            connection = self._store.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            self._connection = connection
            connection.execute(sa.text(f"SET idle_session_timeout = '{SILENT_S}s'"))
            self._pid = connection.scalar(sa.text("SELECT pg_backend_pid()")) or 0
        if self._until:
            self._connection.execute(sa.text("SELECT 1"))
            return True
        if not self._connection.scalar(sa.text(f"SELECT pg_try_advisory_lock({LEADER})")):
            return False
        others = f"SELECT pg_terminate_backend(pid) {HELD} {TERM} AND pid <> pg_backend_pid()"
        self._connection.execute(sa.text(others))
        self._connection.execute(sa.text(f"SELECT pg_advisory_lock({TERM})"))
        self._connection.execute(sa.text(f"SELECT pg_advisory_unlock({TERM})"))
        return True

    def _let_go(self) -> None:
        self._until = 0.0
        if self._connection is not None:
            self._connection.invalidate()  # not back into the pool, where it would go on to hold the lock
            self._connection.close()
            self._connection = None

    def _check(self, session: Session) -> None:
        """At the beginning of a leader's transaction. Raises Superseded if it is none any more."""
        session.execute(sa.text(f"SELECT pg_advisory_xact_lock_shared({TERM})"))
        mine = sa.text(f"SELECT count(*) {HELD} {LEADER} AND pid = :pid").bindparams(pid=self._pid)
        if not (self.leads and session.scalar(mine)):
            raise Superseded("this control does not lead any more: nothing of this was stored")
