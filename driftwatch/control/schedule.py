"""Periodic work. The jobs are declared here and kept in memory; what they did is in the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import httpx
from apscheduler.schedulers.background import BackgroundScheduler

from driftwatch.control import canary, judge, slo
from driftwatch.control.leader import Leader
from driftwatch.errors import DriftwatchError
from driftwatch.retrain import candidates, progress, request
from driftwatch.retrain.delivery import Courier
from driftwatch.settings import Settings
from driftwatch.store import retention, work

log = logging.getLogger(__name__)

MINUTE_S = 60
RETENTION_MINUTES = 30


def scheduler(leader: Leader, settings: Settings, courier: Courier, prompts: Sequence[str]) -> BackgroundScheduler:
    """A scheduler, not yet started. A job that is late runs once; a job never runs beside itself, nor where another
    control leads.

    ``prompts`` are those of the canaries; without any, none are asked.
    """
    jobs = BackgroundScheduler(job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": 60})
    store, tick = leader.store, settings.control.tick_s

    def fold() -> None:
        judge.fold(store, settings, time.time())

    def expire() -> None:
        judge.expire(store, settings, time.time())

    def watch_latencies() -> None:
        slo.judge(store, settings, time.time())

    def request_retrains() -> None:
        request.request(store, settings, time.time())
        progress.expire(store, silence_s=settings.retrain.expire_hours * 3600, now=time.time())

    def judge_candidates() -> None:
        candidates.judge(store, settings, time.time())

    def forget_text() -> None:
        if not settings.retention.text:  # where a shadow runs it does so itself, and sooner
            with store.write() as session:
                work.forget_text(session)

    def prune() -> None:
        keep = settings.retention
        retention.prune(store, now=time.time(), payload_days=keep.payload_days, replay_days=keep.replay_days)
        request.forget(store, keep_days=settings.retrain.data.keep_days, now=time.time())

    def ask_canaries() -> None:
        with httpx.Client(trust_env=False) as client:
            canary.run(store, settings, prompts, client, time.time())

    every_tick = {"judge": fold, "retrain": request_retrains, "candidates": judge_candidates, "deliver": courier.run}
    for name, job in every_tick.items():
        jobs.add_job(_guarded(leader, name, job), "interval", seconds=tick, id=name)
    jobs.add_job(_guarded(leader, "sessions", expire), "interval", seconds=max(tick, MINUTE_S), id="sessions")
    jobs.add_job(_guarded(leader, "slo", watch_latencies), "interval", seconds=max(tick, MINUTE_S), id="slo")
    jobs.add_job(_guarded(leader, "text", forget_text), "interval", seconds=max(tick, MINUTE_S), id="text")
    if prompts:
        minutes = settings.canary.interval_minutes
        jobs.add_job(_guarded(leader, "canaries", ask_canaries), "interval", minutes=minutes, id="canaries")
    jobs.add_job(_guarded(leader, "retention", prune), "interval", minutes=RETENTION_MINUTES, id="retention")
    return jobs


def _guarded(leader: Leader, name: str, job: Callable[[], object]) -> Callable[[], None]:
    """A failing job says so and runs again next time; the others go on."""

    def run() -> None:
        if not leader.leads:
            return
        try:
            job()
        except DriftwatchError as error:
            log.error("%s: %s", name, error)
        except Exception:
            log.exception("bug in job %s", name)

    return run
