"""Addresses that nothing is sent to."""

from __future__ import annotations

from ipaddress import ip_address

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
