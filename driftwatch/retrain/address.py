"""Where a webhook may go: never to a link-local or metadata address, and only to allowed hosts where some are named.

The address that was looked at is the one that is connected to, so that a name that answers differently the next time
(DNS rebinding) gains nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import httpx

from driftwatch.errors import DriftwatchError

METADATA = frozenset(
    ipaddress.ip_address(address) for address in ("169.254.169.254", "100.100.100.200", "192.0.0.192", "fd00:ec2::254")
)
"""Clouds hand out credentials to whoever asks there (AWS, GCP and Azure; Alibaba; Oracle; AWS over IPv6)."""


class RefusedAddress(DriftwatchError):
    """A webhook was to go where none may go."""


@dataclass(frozen=True)
class Route:
    """A URL with the address to connect to in place of its host, and that host for the header and the certificate."""

    url: httpx.URL
    host: str
    server_name: str


def route(url: str, allowed: Sequence[str]) -> Route:
    """Resolve a URL once. Raises RefusedAddress, or OSError for a name that there is not."""
    parsed = httpx.URL(url)
    name = parsed.host
    if allowed and not any(fnmatchcase(name.lower(), pattern.lower()) for pattern in allowed):
        raise RefusedAddress(f"the host {name} is not in delivery.hosts")
    found = socket.getaddrinfo(name, parsed.port, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(str(one[4][0]).partition("%")[0]) for one in found]
    for address in addresses:
        if is_refused(address):
            raise RefusedAddress(f"{name} is {address}, a link-local, metadata or multicast address: never sent to")
    # IPv4 first: a name with both often listens on that alone (localhost).
    chosen = min(addresses, key=lambda address: address.version)
    return Route(parsed.copy_with(host=str(chosen)), parsed.netloc.decode("ascii"), name)


def is_refused(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether nothing may be sent there, also where IPv6 wraps an IPv4 address."""
    inner = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None) or address
    return bool(inner.is_link_local or inner.is_multicast or inner.is_unspecified or inner in METADATA)
