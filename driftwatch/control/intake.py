"""``POST /v1/samples``: the one way in. All of a body is stored, or nothing.

A few bodies are in hand at a time; the others wait unread, and after a while are told to come again. So a slow store
costs control neither memory nor its other answers, and a sender keeps what was not acknowledged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import orjson
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from driftwatch.control import changes, slo
from driftwatch.control.problems import Problem
from driftwatch.errors import RecordError
from driftwatch.records import Record, parse_record
from driftwatch.settings import Settings
from driftwatch.store import samples
from driftwatch.store.connection import Store

MAX_BODY = 16 * 1024 * 1024
AT_ONCE = 8
"""Bodies in hand: as many connections to the store, and as much memory."""
WAIT_S = 5.0
"""How long a further one waits for its turn."""
READ_S = 30.0
"""How long a sender may take over a body: it holds a turn."""


def router(store: Store, settings: Settings) -> APIRouter:
    routes = APIRouter(prefix="/v1")
    turns = asyncio.Semaphore(AT_ONCE)

    @routes.post("/samples", status_code=201, openapi_extra=_DOCUMENTATION)
    async def post_samples(request: Request) -> JSONResponse:
        """Store one Record, an array of them, or NDJSON; answered when they are stored. A known id is a duplicate."""
        async with _turn(turns):
            body = await _read(request)
            stored = await run_in_threadpool(_store, store, settings, body)
        return JSONResponse({"stored": stored.stored, "duplicates": stored.duplicates}, 201)

    return routes


_DOCUMENTATION = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"oneOf": [Record.model_json_schema(), {"type": "array"}]}},
            "application/x-ndjson": {"schema": {"type": "string"}},
        },
    }
}


@asynccontextmanager
async def _turn(turns: asyncio.Semaphore) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(WAIT_S):
            await turns.acquire()
    except TimeoutError:
        busy = f"{AT_ONCE} bodies are being stored and none was done within {WAIT_S:g} s"
        raise Problem(429, "busy", busy, "nothing of this request was stored; send it again later") from None
    try:
        yield
    finally:
        turns.release()


async def _read(request: Request) -> bytes:
    """The body, refused before it is read where its length is known, else as soon as it is too long, or too slow."""
    try:
        async with asyncio.timeout(READ_S):
            return await _body(request)
    except TimeoutError:
        slow = f"the body did not come within {READ_S:g} s"
        raise Problem(408, "too_slow", slow, "nothing of this request was stored; send it again") from None


async def _body(request: Request) -> bytes:
    too_large = Problem(413, "too_large", f"the body is over {MAX_BODY} bytes", "send fewer records at a time")
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or int(declared) > MAX_BODY:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def _store(store: Store, settings: Settings, body: bytes) -> samples.Stored:
    try:
        records = list(parse(body))
        if not records:
            raise Problem(400, "empty", "the body holds no record", "send one Record, an array of them, or NDJSON")
        return _add(store, settings, records, time.time())
    except RecordError as error:
        raise Problem(400, "invalid_record", str(error), "correct that record and send all of them again") from None


def _add(store: Store, settings: Settings, records: list[Record], now: float) -> samples.Stored:
    with store.write() as session:
        stored = samples.add(
            session,
            [(record, _drafts(settings, record)) for record in records],
            now=now,
            max_segments=settings.control.max_segments,
            tokens_per_day=settings.sampling.tokens_per_day,
            limits=slo.limits(settings.slo),
        )
        for change in stored.changes:
            changes.tell(session, settings, change, now)
        return stored


def _drafts(settings: Settings, record: Record) -> list[str]:
    if not record.has_ids and not record.output:
        return []  # figures alone, from an engine's log
    model = settings.model_for(record.model)
    return [draft.name for draft in model.drafts if draft.path is not None] if model else []


def parse(body: bytes) -> Iterator[Record]:
    """Records of one object, an array, or one object a line. Raises RecordError naming the record."""
    text = body.strip()
    if text.startswith(b"["):
        try:
            items = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise RecordError(f"the body is not JSON: {error}") from None
        for number, item in enumerate(items):
            try:
                one = orjson.dumps(item)
            except TypeError:
                raise RecordError(f"record {number}: nested too deeply") from None
            yield parse_record(one, where=f"record {number}")
        return
    try:
        orjson.loads(text)
        lines = [text]
    except orjson.JSONDecodeError:
        lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield parse_record(line, where=f"line {number}" if len(lines) > 1 else "the body")
