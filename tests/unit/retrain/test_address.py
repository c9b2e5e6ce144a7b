"""Addresses that nothing is sent to."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest

from driftwatch.retrain.address import RefusedAddress, is_refused, route


@pytest.mark.parametrize(
    ("address", "refused"),
    [
        ("169.254.169.254", True),
        ("169.254.0.1", True),
        ("100.100.100.200", True),
        ("fd00:ec2::254", True),
        ("fe80::1", True),
        ("::ffff:169.254.169.254", True),
        ("2002:a9fe:a9fe::", True),  # 6to4 around 169.254.169.254
        ("64:ff9b::169.254.169.254", True),
        ("64:ff9b::10.0.0.1", False),
        ("168.63.129.16", True),
        ("fd20:ce::254", True),
        ("fd00:ec2::23", True),
        ("224.0.0.1", True),
        ("0.0.0.0", True),
        ("::", True),
        ("127.0.0.1", False),  # a receiver beside control
        ("10.1.2.3", False),  # a receiver in the cluster
        ("fd00::1", False),
        ("93.184.216.34", False),
    ],
)
def test_link_local_metadata_and_nowhere(address: str, refused: bool) -> None:
    assert is_refused(ip_address(address)) == refused


def test_the_address_takes_the_place_of_the_name() -> None:
    found = route("https://localhost:9000/hook?a=b", ())
    assert found.url.host in ("127.0.0.1", "::1")
    assert (found.url.port, found.url.raw_path) == (9000, b"/hook?a=b")
    assert (found.host, found.server_name) == ("localhost:9000", "localhost")


@pytest.mark.parametrize(("pattern", "allowed"), [("LOCALHOST", True), ("local*", True), ("host", False), ("", False)])
def test_only_hosts_that_are_named(pattern: str, allowed: bool) -> None:
    if allowed:
        assert route("http://localhost/", [pattern]).server_name == "localhost"
    else:
        with pytest.raises(RefusedAddress, match=r"the host localhost is not in delivery\.hosts"):
            route("http://localhost/", [pattern])


@pytest.mark.parametrize("host", ["2852039166", "0xa9fea9fe", "169.254.43518", "[::ffff:a9fe:a9fe]", "[fe80::1%25lo]"])
def test_other_spellings_of_such_an_address(host: str) -> None:
    with pytest.raises((RefusedAddress, OSError)):
        route(f"http://{host}/", ())


def test_one_refused_address_among_several_refuses_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: Any, **__: Any) -> list[Any]:
        return [(2, 1, 6, "", ("127.0.0.1", 80)), (2, 1, 6, "", ("169.254.169.254", 80))]

    monkeypatch.setattr("socket.getaddrinfo", answer)
    with pytest.raises(RefusedAddress, match=r"name\.example is 169\.254\.169\.254"):
        route("http://name.example/", ())
