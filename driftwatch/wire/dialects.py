"""Which module reads which engine, and what each may be asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from driftwatch.records import Record
from driftwatch.wire import openai, responses, sglang, trtllm, vllm
from driftwatch.wire.exchange import Exchange
from driftwatch.wire.injection import Injected

Inject = Callable[[str, bytes, Mapping[str, str]], Injected | None]


@dataclass(frozen=True)
class Dialect:
    """How an engine speaks."""

    routes: frozenset[str]
    """Paths whose exchanges may give a record."""
    read: Callable[[Exchange], Record]
    inject: Inject | None = None
    """From path, body and known facts: the request that asks for more. None: unknown fields might be refused."""


COMMON = openai.ROUTES | {responses.RESPONSES}
DIALECTS: Mapping[str, Dialect] = {
    "vllm": Dialect(COMMON, vllm.record, vllm.inject),
    "sglang": Dialect(COMMON | {sglang.GENERATE}, sglang.record, sglang.inject),
    "trtllm": Dialect(COMMON, trtllm.record),
    "openai": Dialect(COMMON, openai.record),
}


def of(kind: str | None) -> Dialect:
    """The dialect of an engine kind; where that is not known yet, what all of them have in common."""
    return DIALECTS.get(kind or "openai", DIALECTS["openai"])


def record(exchange: Exchange) -> Record:
    """Read an exchange in its engine's dialect. Raises Skip."""
    if exchange.path == responses.RESPONSES:
        return responses.record(exchange)
    return of(exchange.deployment.get("engine")).read(exchange)
