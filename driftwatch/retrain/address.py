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
    ipaddress.ip_address(address)
    for address in (
        "169.254.169.254",  # AWS, GCP, Azure
        "168.63.129.16",  # Azure's WireServer
        "100.100.100.200",  # Alibaba
        "192.0.0.192",  # Oracle
        "fd00:ec2::254",  # AWS
        "fd00:ec2::23",  # AWS EKS Pod Identity
        "fd20:ce::254",  # GCP
    )
)
"""Clouds hand out credentials to whoever asks there."""
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""Behind it a network reaches IPv4 (RFC 6052, section 2.1)."""


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
    inner = _unwrapped(address)
    return bool(inner.is_link_local or inner.is_multicast or inner.is_unspecified or inner in METADATA)


def _unwrapped(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IPv4 address that an IPv6 one stands for (mapped, 6to4, NAT64), or itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
