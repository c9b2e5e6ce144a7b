"""What is seen of bodies at a glance, in the request path: they are parsed later, and only those that are kept."""

from __future__ import annotations

import re

# The last count in an answer is its final usage. Inside a string the quotes would be escaped, so text cannot fake it.
_TOKENS = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)')
_COUNTS = (b'"completion_tokens"', b'"output_tokens"')
_FINGERPRINT = re.compile(rb'"system_fingerprint"\s*:\s*"([^"\\]+)"')
_SGLEXT_IDS = re.compile(rb'"output_ids"\s*:\s*\[\[([\d,\s]+)\]\]')
_ERROR = re.compile(rb'^data:\s*\{\s*"error"', re.MULTILINE)
_SEVERAL = re.compile(rb'"(?:n|best_of)"\s*:\s*(?:[2-9]|\d\d)')
_HUGE = re.compile(rb"\d{19}")


def tokens(response: bytes) -> int | None:
    """The engine's own count of output tokens: from its usage, else from the ids that SGLang puts behind a stream."""
    start = max(response.rfind(name) for name in _COUNTS)
    if start >= 0 and (found := _TOKENS.match(response, start)):
        return int(found[1])
    ids = _SGLEXT_IDS.search(response, max(0, response.rfind(b'"sglext"')))
    return ids[1].count(b",") + 1 if ids else None


def fingerprint(response: bytes) -> str | None:
    found = _FINGERPRINT.match(response, max(0, response.rfind(b'"system_fingerprint"')))
    return found[1].decode(errors="replace") if found else None


def has_ended(last: bytes) -> bool:
    """Whether a stream said its last word. Many clients close the connection there, before the engine does."""
    return last.rstrip().endswith(b"data: [DONE]")


def has_failed(last: bytes) -> bool:
    """Whether a stream ends in an error, under status 200, as it came late."""
    return _ERROR.search(last) is not None


def asks_for_several(request: bytes) -> bool:
    """Whether there are several choices, whose tokens the usage counts together."""
    return _SEVERAL.search(request) is not None


def has_huge_numbers(request: bytes) -> bool:
    """Perhaps an integer that would not survive being read and written."""
    return _HUGE.search(request) is not None
