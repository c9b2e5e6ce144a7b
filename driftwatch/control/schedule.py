"""Periodic work. The jobs are declared here and kept in memory; what they did is in the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from apscheduler.schedulers.background import BackgroundScheduler

from driftwatch.control import judge
from driftwatch.errors import DriftwatchError
from driftwatch.retrain import policy
from driftwatch.retrain.delivery import Courier
from driftwatch.settings import Settings
from driftwatch.store import retention, work
from driftwatch.store.connection import Store

log = logging.getLogger(__name__)

MINUTE_S = 60
RETENTION_MINUTES = 30


def scheduler(store: Store, settings: Settings, courier: Courier) -> BackgroundScheduler:
    """A scheduler, not yet started. A job that is late runs once; a job never runs beside itself."""
    jobs = BackgroundScheduler(job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": 60})
    tick = settings.control.tick_s

    def fold() -> None:
        judge.fold(store, settings, time.time())

    def expire() -> None:
        judge.expire(store, settings, time.time())

    def request_retrains() -> None:
        policy.request(store, settings, time.time())

    def forget_text() -> None:
        if not settings.retention.text:  # where a shadow runs it does so itself, and sooner
            with store.write() as session:
                work.forget_text(session)

    def prune() -> None:
        keep = settings.retention
        retention.prune(store, now=time.time(), payload_days=keep.payload_days, replay_days=keep.replay_days)

    for name, job in {"judge": fold, "retrain": request_retrains, "deliver": courier.run}.items():
        jobs.add_job(_guarded(name, job), "interval", seconds=tick, id=name)
    jobs.add_job(_guarded("sessions", expire), "interval", seconds=max(tick, MINUTE_S), id="sessions")
    jobs.add_job(_guarded("text", forget_text), "interval", seconds=max(tick, MINUTE_S), id="text")
    jobs.add_job(_guarded("retention", prune), "interval", minutes=RETENTION_MINUTES, id="retention")
    return jobs


def _guarded(name: str, job: Callable[[], object]) -> Callable[[], None]:
    """A failing job says so and runs again next time; the others go on."""

    def run() -> None:
        try:
            job()
        except DriftwatchError as error:
            log.error("%s: %s", name, error)
        except Exception:
            log.exception("bug in job %s", name)

    return run
