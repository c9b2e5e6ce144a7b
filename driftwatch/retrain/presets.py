"""The shape in which an endpoint wants events: a CloudEvent, GitHub's ``repository_dispatch``, or a body of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from driftwatch.errors import SettingsError
from driftwatch.settings import Webhook, secret

CLOUDEVENT = "application/cloudevents+json; charset=utf-8"
JSON = "application/json"
GITHUB_VERSION = "2022-11-28"
EVENT_TYPE_LENGTH = 100
"""Longest ``event_type`` that GitHub takes."""

_NAME = re.compile(r"\$\{([\w.-]+)\}")


def template(webhook: Webhook) -> Any:
    """The endpoint's own body as JSON, None without one. Raises SettingsError if it cannot be read."""
    if webhook.template is None:
        return None
    try:
        return json.loads(webhook.template.read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(
            f"`webhooks[].template` of {webhook.name!r}: {webhook.template}: {reason}; write a JSON body"
        ) from None


def shaped(webhook: Webhook, body: bytes) -> tuple[bytes, dict[str, str]]:
    """Bytes and headers (signature aside) for one endpoint. Raises SettingsError for what it names and there is not.

    - ``plain``: the CloudEvent in structured mode.
    - ``argo``: the same as plain JSON, its attributes in ``ce-`` headers too (an Argo Events webhook source gives a
      sensor ``body`` and ``header``, and filters on either).
    - ``github``: ``POST /repos/{owner}/{repo}/dispatches`` with ``event_type`` and ``client_payload``, which may have
      ten properties at most: the event is one of them.
    """
    headers = {"content-type": CLOUDEVENT}
    own = template(webhook)
    if own is not None:
        headers = {"content-type": JSON}
        body = json.dumps(fill(own, json.loads(body))).encode()
    elif webhook.preset == "argo":
        event = json.loads(body)
        headers = {"content-type": JSON} | {
            f"ce-{name}": str(event[name]).encode("ascii", "backslashreplace").decode()
            for name in ("id", "source", "specversion", "time", "type")
        }
    elif webhook.preset == "github":
        event = json.loads(body)
        headers = {"content-type": JSON, "accept": "application/vnd.github+json"}
        headers |= {"x-github-api-version": GITHUB_VERSION, "user-agent": "driftwatch"}
        dispatch = {"event_type": event["type"][:EVENT_TYPE_LENGTH], "client_payload": {"event": event}}
        body = json.dumps(dispatch).encode()
    if (token := secret(webhook.token, webhook.token_file, "webhooks[].token_file")) is not None:
        headers["authorization"] = f"Bearer {token}"
    headers |= {name.lower(): value.get_secret_value() for name, value in webhook.headers.items()}
    return body, headers


def fill(own: Any, event: Mapping[str, Any]) -> Any:
    """A template with its names replaced: a string that is one name becomes the value itself, others hold its text."""
    if isinstance(own, dict):
        return {key: fill(value, event) for key, value in own.items()}
    if isinstance(own, list):
        return [fill(value, event) for value in own]
    if not isinstance(own, str):
        return own
    if whole := _NAME.fullmatch(own):
        return _value(event, whole[1])
    return _NAME.sub(lambda name: _text(_value(event, name[1])), own)


def _value(event: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    for part in path.split("."):
        event = event.get(part) if isinstance(event, dict) else None
    return event


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
