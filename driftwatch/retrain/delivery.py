"""Delivering the outbox: at least once, in order for each endpoint, signed anew on every attempt.

Signatures follow Standard Webhooks: ``webhook-id`` (the event's id, stable over attempts), ``webhook-timestamp`` and
``webhook-signature`` with one HMAC-SHA256 for each active secret, over the bytes that are sent. The outbox keeps the
event; its shape for an endpoint (``presets``) follows from that and the settings, so it is the same on every attempt
until somebody changes them.

Redirects are failures, and are not followed. An answer's body is not read, however long it is.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx
from standardwebhooks import Webhook as Signer
from standardwebhooks.webhooks import EmptyWebhookSecretError

from driftwatch.errors import DriftwatchError, SettingsError
from driftwatch.retrain import presets
from driftwatch.retrain.address import route
from driftwatch.settings import Webhook, secret
from driftwatch.store import outbox
from driftwatch.store.connection import Store
from driftwatch.store.schema import Delivery

log = logging.getLogger(__name__)

FIRST_RETRY_S = 5.0
LONGEST_RETRY_S = 6 * 3600.0
ATTEMPTS = 16
"""With the waits above about a day, then the delivery is dead until somebody sends it again."""
TIMEOUT_S = 10.0
"""Longest silence of a receiver."""
DEADLINE_S = 20.0
"""Longest wait for its whole answer."""
GONE = 410


def signers(webhook: Webhook) -> list[Signer]:
    """One signer for each secret. Raises SettingsError for a secret that is not base64."""
    secrets = [value.get_secret_value() for value in webhook.secrets]
    if webhook.secrets_file is not None:
        secrets += (secret(None, webhook.secrets_file, "webhooks[].secrets_file") or "").split()
    try:
        return [Signer(value) for value in secrets]
    except (ValueError, RuntimeError, EmptyWebhookSecretError) as error:
        raise SettingsError(f"`webhooks[].secrets` of {webhook.name!r}: {error}; write whsec_ and base64") from None


def sign(signers: Sequence[Signer], event_id: str, body: bytes, at: datetime) -> dict[str, str]:
    """The three headers; without a secret only id and timestamp."""
    headers = {"webhook-id": event_id, "webhook-timestamp": str(int(at.timestamp()))}
    if signers:
        signatures = [signer.sign(msg_id=event_id, timestamp=at, data=body.decode()) for signer in signers]
        headers["webhook-signature"] = " ".join(signatures)
    return headers


class Courier:
    """Sends what is due. One of it runs at a time.

    Raises SettingsError for a secret or a template that cannot be used. Both are read anew for each attempt, so that a
    rotated file needs no restart.
    """

    def __init__(self, store: Store, webhooks: Sequence[Webhook], hosts: Sequence[str] = ()) -> None:
        self._store = store
        self._webhooks: Mapping[str, Webhook] = {hook.name: hook for hook in webhooks}
        self._hosts = hosts
        for hook in webhooks:
            signers(hook)
            presets.template(hook)
        # No connection is kept: two names at one address must not share one, whose certificate is for the first.
        once = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(timeout=TIMEOUT_S, limits=once, follow_redirects=False, trust_env=False)
        self._threads = ThreadPoolExecutor(thread_name_prefix="webhook")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def run(self) -> int:
        """Try everything that is due once; the number delivered.

        The answer is recorded in a transaction of its own after each attempt: a crash in between sends the same event
        again, under the same id.
        """
        delivered = 0
        while True:
            with self._store.read() as session:
                due = outbox.due(session, time.time())
            if not due:
                return delivered
            for delivery in due:
                error, wait_s = self._send(delivery)
                with self._store.write() as session:
                    delivered += _settle(session.get_one(Delivery, delivery.id), error, wait_s)

    def _send(self, delivery: Delivery) -> tuple[str | None, float | None]:
        """None where the endpoint took it, else what went wrong and for how long it asks to be left alone."""
        webhook = self._webhooks.get(delivery.endpoint)
        if webhook is None:
            return "the endpoint is no longer configured", None
        attempt = self._threads.submit(self._post, webhook, delivery.event_id, delivery.body)
        try:
            return attempt.result(DEADLINE_S)
        except TimeoutError:  # it drips: the thread goes on to its own end, the others need not wait for it
            return f"no whole answer within {DEADLINE_S:.0f} s", None

    def _post(self, webhook: Webhook, event_id: str, event: bytes) -> tuple[str | None, float | None]:
        try:
            body, headers = presets.shaped(webhook, event)
            headers |= sign(signers(webhook), event_id, body, datetime.now(UTC))
            to = route(webhook.url, self._hosts)
            named = {"sni_hostname": to.server_name}
            request = self._client.build_request(
                "POST", to.url, content=body, headers=headers | {"host": to.host}, extensions=named
            )
            response = self._client.send(request, stream=True)
            try:
                if response.is_success:
                    return None, None
                return f"{response.status_code} {response.reason_phrase}".strip(), _retry_after(response)
            finally:
                response.close()
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            return f"{type(error).__name__}: {error}", None
        except DriftwatchError as error:
            return str(error), None


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds that it asks for, as a number or a date (RFC 9110, section 10.2.3)."""
    value = response.headers.get("retry-after", "")
    if value.isascii() and value.isdigit():
        return min(float(value), LONGEST_RETRY_S)
    try:
        left = parsedate_to_datetime(value).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return None
    return min(max(left, 0.0), LONGEST_RETRY_S)


def _settle(delivery: Delivery, error: str | None, wait_s: float | None) -> int:
    now = time.time()
    delivery.attempts += 1
    delivery.error = error
    if error is None:
        delivery.state, delivery.delivered_at = "delivered", now
        return 1
    if error.startswith(str(GONE)) or delivery.attempts >= ATTEMPTS:
        delivery.state = "dead"
        delivery.given_up += 1
        log.error("webhook %s: %s given up: %s", delivery.endpoint, delivery.event_id, error)
        return 0
    backoff = min(FIRST_RETRY_S * 2 ** (delivery.attempts - 1), LONGEST_RETRY_S)
    delivery.due_at = now + (wait_s or backoff) * random.uniform(0.75, 1.25)
    log.warning("webhook %s: %s; next try in %.0f s", delivery.endpoint, error, delivery.due_at - now)
    return 0
