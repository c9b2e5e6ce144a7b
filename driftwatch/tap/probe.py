"""Which engine is behind the tap. Asked in the background; a request never waits for the answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import aiohttp

from driftwatch.settings import EngineKind
from driftwatch.wire import sglang

logger = logging.getLogger(__name__)

AGAIN_S = 60.0
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 15.0
TIMEOUT = aiohttp.ClientTimeout(total=5)
LARGEST = 1024 * 1024

SGLANG_FACTS = {
    "version": "version",
    "target": "model_path",
    "quantization": "quantization",
    "kv_cache_dtype": "kv_cache_dtype",
    "parallelism": "tp_size",
    "draft": "speculative_draft_model_path",
    "draft_quantization": "speculative_draft_model_quantization",
    "speculative_algorithm": "speculative_algorithm",
    "speculative_num_steps": "speculative_num_steps",
    "speculative_eagle_topk": "speculative_eagle_topk",
    "speculative_num_draft_tokens": "speculative_num_draft_tokens",
    "speculative_adaptive": "speculative_adaptive",
    "speculative_use_rejection_sampling": "speculative_use_rejection_sampling",
    "speculative_use_block_verification": "speculative_use_block_verification",
    "speculative_accept_threshold_single": "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc": "speculative_accept_threshold_acc",
    "return_input_ids": "return_input_ids",
    "return_output_ids": "return_output_ids",
}
"""Our word for a fact, and the key of SGLang's ``/server_info`` (0.5.23; resolved settings, flat)."""


class Probe:
    """What is known of the engine at ``url``: its kind, and the facts that each record is stamped with.

    An engine that was replaced between two looks would be stamped with facts of the old one, and its change told twice:
    once when its fingerprint changes, once when the rest is asked. So facts in doubt are none until it has answered.

    ``token`` is the engine's API key. Without the right one an engine says little of itself: see ``barred``.
    """

    def __init__(self, url: str, kind: EngineKind, token: str | None = None) -> None:
        self._url = url
        self.headers: Mapping[str, str] = {"authorization": f"Bearer {token}"} if token else {}
        """To be sent with questions to the engine."""
        self._barred = False
        """It wanted an API key, or another one, when it was asked last."""
        self._auto = kind == "auto"
        self.kind: EngineKind = kind
        self._asked = _facts(kind, {})
        self._learned: dict[str, str] = {}
        self._fingerprint: str | None = None
        self._doubted = asyncio.Event()
        self.deployment: dict[str, str] = self._asked

    async def run(self) -> None:
        """Ask until the engine answers, then every minute or when in doubt: it may be replaced by another version."""
        pause = FIRST_RETRY_S
        async with aiohttp.ClientSession(timeout=TIMEOUT, cookie_jar=aiohttp.DummyCookieJar()) as session:
            while True:
                self._doubted.clear()
                if await self.ask(session):
                    pause = AGAIN_S
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._doubted.wait(), pause)
                        await asyncio.sleep(FIRST_RETRY_S)  # two versions side by side raise doubts all the time
                else:
                    pause = FIRST_RETRY_S if pause == AGAIN_S else min(2 * pause, LONGEST_RETRY_S)
                    await asyncio.sleep(pause)

    def doubt(self) -> None:
        """The engine may be another one now: forget all but its kind, and ask again."""
        self._learned = {}
        self._asked = self.deployment = _facts(self.kind, {})
        self._doubted.set()

    def facts(self, fingerprint: str | None) -> dict[str, str]:
        """Facts to stamp an exchange with, whose answer had this ``system_fingerprint``."""
        if fingerprint is not None:
            if self._fingerprint not in (None, fingerprint):
                self.doubt()
            self._fingerprint = fingerprint
        return self.deployment

    async def ask(self, session: aiohttp.ClientSession) -> bool:
        """Ask once. False if the engine did not answer; what was known then stays."""
        barred, self._barred = self._barred, False
        try:
            kind, found = await self._identify(session)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
        if self._barred and not barred:
            logger.warning(
                "the engine at %s wants an API key: its version and settings stay unknown, and figures that depend on"
                " them are missing; set engine.token or engine.token_file",
                self._url,
            )
        if self._auto and kind != self.kind:
            logger.info("the engine is %s %s", kind, found.get("version", ""))
            self.kind = kind
            self._learned = {}
        self._asked = _facts(self.kind, found)
        self.deployment = self._learned | self._asked
        return True

    def learn(self, facts: Mapping[str, str]) -> None:
        """Facts that were found elsewhere, in the engine's metrics."""
        if facts and facts != self._learned:
            self._learned = dict(facts)
            self.deployment = self._learned | self._asked

    async def _identify(self, session: aiohttp.ClientSession) -> tuple[EngineKind, dict[str, str]]:
        answer = await self._get(session, "/version")
        if version := _version(answer):
            model = _first_model(await self._get(session, "/v1/models"))
            kind = await self._versioned(session, model.get("owned_by")) if self._auto else self.kind
            if kind is not None:
                return kind, _known({"version": version, "target": model.get("root")})
        for path in ("/server_info", "/get_server_info"):  # the older name is deprecated since about 0.5.9
            if answer := await self._get(session, path):
                found = _known({ours: answer.get(theirs) for ours, theirs in SGLANG_FACTS.items()})
                return "sglang", found | sglang.verification(found)
        if self._barred and b"sglang:" in await self._read(session, "/metrics"):  # asked for without a key
            return "sglang", {}
        return "openai", {}

    async def _versioned(self, session: aiohttp.ClientSession, owner: Any) -> EngineKind | None:
        """Which engine answers /version. Many servers do, and not all take request fields that they do not know.

        vLLM names itself as the owner of its models; with an API key it hides them, but not its metrics.
        """
        if owner is None and b"vllm:" in await self._read(session, "/metrics"):
            owner = "vllm"
        owners: dict[Any, EngineKind] = {"vllm": "vllm", "tensorrt_llm": "trtllm"}
        return owners.get(owner)

    async def _read(self, session: aiohttp.ClientSession, path: str) -> bytes:
        async with session.get(self._url + path, headers=self.headers, allow_redirects=False) as response:
            return await response.content.read(LARGEST) if response.status == 200 else b""

    async def _get(self, session: aiohttp.ClientSession, path: str) -> dict[str, Any] | None:
        async with session.get(self._url + path, headers=self.headers, allow_redirects=False) as response:
            self._barred |= response.status in (401, 403)
            if response.status >= 500:  # an engine that is still loading, or a gateway without one
                response.raise_for_status()
            if response.status != 200 or (response.content_length or 0) > LARGEST:
                return None
            try:
                answer = await response.json(content_type=None)
            except (ValueError, UnicodeDecodeError):
                return None
            return answer if isinstance(answer, dict) else None


def _facts(kind: EngineKind, found: dict[str, str]) -> dict[str, str]:
    """Only what is known: ``openai`` says how an engine speaks, not what it is."""
    facts: dict[str, str] = {} if kind in ("auto", "openai") else {"engine": kind}
    return facts | found


def _known(values: Mapping[str, Any]) -> dict[str, str]:
    """Facts as text; what is not set, or off, is none."""
    return {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in values.items()
        if isinstance(value, str | int | float) and value not in ("", False)
    }


def _version(answer: dict[str, Any] | None) -> str | None:
    version = (answer or {}).get("version")
    return version if isinstance(version, str) and version else None


def _first_model(models: dict[str, Any] | None) -> dict[str, Any]:
    data = (models or {}).get("data")
    first = data[0] if isinstance(data, list) and data else None
    return first if isinstance(first, dict) else {}
