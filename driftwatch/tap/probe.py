"""Which engine is behind the tap. Asked in the background; a request never waits for the answer."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp

from driftwatch.settings import EngineKind

logger = logging.getLogger(__name__)

AGAIN_S = 60.0
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 15.0
TIMEOUT = aiohttp.ClientTimeout(total=5)
LARGEST = 1024 * 1024


class Probe:
    """What is known of the engine at ``url``: its kind, and the facts that each record is stamped with."""

    def __init__(self, url: str, kind: EngineKind) -> None:
        self._url = url
        self._auto = kind == "auto"
        self.kind: EngineKind = kind
        self.deployment = _facts(kind, None)

    async def run(self) -> None:
        """Ask until the engine answers, then every minute: it may be replaced by another version."""
        pause = FIRST_RETRY_S
        async with aiohttp.ClientSession(timeout=TIMEOUT, cookie_jar=aiohttp.DummyCookieJar()) as session:
            while True:
                if await self.ask(session):
                    pause = AGAIN_S
                else:
                    pause = FIRST_RETRY_S if pause == AGAIN_S else min(2 * pause, LONGEST_RETRY_S)
                await asyncio.sleep(pause)

    async def ask(self, session: aiohttp.ClientSession) -> bool:
        """Ask once. False if the engine did not answer; what was known then stays."""
        try:
            kind, version = await self._identify(session)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
        if self._auto and kind != self.kind:
            logger.info("the engine is %s %s", kind, version or "")
            self.kind = kind
        self.deployment = _facts(self.kind, version)
        return True

    async def _identify(self, session: aiohttp.ClientSession) -> tuple[EngineKind, str | None]:
        answer = await self._get(session, "/version")
        if version := _version(answer):
            # TensorRT-LLM answers /version alike, but refuses request fields that it does not know.
            models = await self._get(session, "/v1/models")
            return ("trtllm" if _owner(models) == "tensorrt_llm" else "vllm"), version
        for path in ("/server_info", "/get_server_info"):
            if answer := await self._get(session, path):
                return "sglang", _version(answer)
        return "openai", None

    async def _get(self, session: aiohttp.ClientSession, path: str) -> dict[str, Any] | None:
        async with session.get(self._url + path, allow_redirects=False) as response:
            if response.status >= 500:  # an engine that is still loading, or a gateway without one
                response.raise_for_status()
            if response.status != 200 or (response.content_length or 0) > LARGEST:
                return None
            try:
                answer = await response.json(content_type=None)
            except (ValueError, UnicodeDecodeError):
                return None
            return answer if isinstance(answer, dict) else None


def _facts(kind: EngineKind, version: str | None) -> dict[str, str]:
    """Only what is known: ``openai`` says how an engine speaks, not what it is."""
    facts: dict[str, str] = {} if kind in ("auto", "openai") else {"engine": kind}
    return {**facts, "version": version} if version else facts


def _version(answer: dict[str, Any] | None) -> str | None:
    version = (answer or {}).get("version")
    return version if isinstance(version, str) and version else None


def _owner(models: dict[str, Any] | None) -> object:
    data = (models or {}).get("data")
    first = data[0] if isinstance(data, list) and data else None
    return first.get("owned_by") if isinstance(first, dict) else None
