"""NetworkPolicies as a cluster applies them: a connection needs leave at both ends, wherever a policy selects one."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

import pytest

from tests.unit.deploy.test_manifests import OVERLAYS, containers, kind, named, overlay

Manifest = dict[str, Any]


@dataclass(frozen=True)
class End:
    """A pod, by its labels and ports, or an address outside (``ip``)."""

    labels: tuple[tuple[str, str], ...] = ()
    namespace: str = "inference"
    ports: tuple[tuple[str, int], ...] = ()
    ip: str = "10.0.0.1"


def pod(manifests: tuple[Manifest, ...], name: str) -> End:
    template = named(manifests, "Deployment", name)["spec"]["template"]
    labels = template["metadata"]["labels"]
    ports = [
        (port["name"], port["containerPort"])
        for one in containers(named(manifests, "Deployment", name))
        for port in one.get("ports", [])
    ]
    return End(tuple(labels.items()), ports=tuple(ports))


def engine(manifests: tuple[Manifest, ...]) -> End:
    (name,) = (one["metadata"]["name"] for one in kind(manifests, "Deployment") if _tapped(one))
    return pod(manifests, name)


def _tapped(deployment: Manifest) -> bool:
    return bool(deployment["metadata"]["labels"].get("driftwatch.io/tap") == "true")


def selects(selector: Manifest, labels: tuple[tuple[str, str], ...]) -> bool:
    return bool(selector.get("matchLabels", {}).items() <= dict(labels).items())


def is_peer(peer: Manifest, other: End) -> bool:
    if "ipBlock" in peer:
        address, block = ipaddress.ip_address(other.ip), peer["ipBlock"]
        inside = address in ipaddress.ip_network(block["cidr"])
        return inside and all(address not in ipaddress.ip_network(one) for one in block.get("except", []))
    if "namespaceSelector" in peer:
        where = {"kubernetes.io/metadata.name": other.namespace}
        if not selects(peer["namespaceSelector"], tuple(where.items())):
            return False
    elif other.namespace != "inference":
        return False
    return selects(peer.get("podSelector", {}), other.labels)


def allows(manifests: tuple[Manifest, ...], direction: str, end: End, other: End, to: End, port: int) -> bool:
    """Whether an end may receive from (``ingress``) or send to (``egress``) the other one."""
    policies = [
        one["spec"]
        for one in kind(manifests, "NetworkPolicy")
        if selects(one["spec"]["podSelector"], end.labels) and end.namespace == "inference"
    ]
    mine = [one for one in policies if direction.capitalize() in one["policyTypes"]]
    side = {"ingress": "from", "egress": "to"}[direction]
    for rule in (rule for one in mine for rule in one[direction]):
        ports = {dict(to.ports).get(one["port"], one["port"]) for one in rule["ports"]}
        if port in ports and (side not in rule or any(is_peer(peer, other) for peer in rule[side])):
            return True
    return not mine


def may(manifests: tuple[Manifest, ...], sender: End, to: End, port: int) -> bool:
    return allows(manifests, "egress", sender, to, to, port) and allows(manifests, "ingress", to, sender, to, port)


PROMETHEUS = End((("app.kubernetes.io/name", "prometheus"),), "monitoring")
CLIENT = End((("app", "chat"),), "chat")
NEIGHBOUR = End((("app", "chat"),))
DATABASE = End((("app", "postgres"),), "databases")
PIPELINE = End((("app.kubernetes.io/name", "retrain-pipeline"),))
METADATA = End((), "nowhere", ip="169.254.169.254")
OUTSIDE = End((), "nowhere", ip="203.0.113.7")


@pytest.mark.parametrize("name", OVERLAYS)
def test_who_must_reach_whom_can(name: str) -> None:
    manifests = overlay(name)
    control, shadow, tapped = (
        pod(manifests, "driftwatch-control"),
        pod(manifests, "driftwatch-shadow"),
        engine(manifests),
    )
    for to, port in ((control, 9465), (shadow, 9466), (tapped, 9465)):
        assert may(manifests, PROMETHEUS, to, port)
    assert may(manifests, tapped, control, 9464), "samples"
    assert may(manifests, CLIENT, tapped, 8080)
    assert may(manifests, CLIENT, tapped, 8000), "around the tap"
    for one in (control, shadow):
        assert may(manifests, one, DATABASE, 5432)
        assert may(manifests, one, tapped, 8000), "canaries, doctor, the governor, hidden states"
        assert may(manifests, one, End(ip="169.254.20.10"), 53), "a name server on the node"
    assert may(manifests, control, PIPELINE, 9000)
    assert may(manifests, PIPELINE, control, 9464), "reports"
    assert may(manifests, control, OUTSIDE, 443), "webhooks"


@pytest.mark.parametrize("name", OVERLAYS)
def test_nobody_else_can(name: str) -> None:
    manifests = overlay(name)
    control, shadow = pod(manifests, "driftwatch-control"), pod(manifests, "driftwatch-shadow")
    assert not any(may(manifests, one, control, 9464) for one in (CLIENT, NEIGHBOUR, PROMETHEUS))
    assert not any(may(manifests, one, shadow, 9466) for one in (CLIENT, NEIGHBOUR, control))
    assert not may(manifests, control, METADATA, 443)
    assert not may(manifests, control, METADATA, 80)
    assert not may(manifests, control, NEIGHBOUR, 8000)
    assert not may(manifests, shadow, OUTSIDE, 443)


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_engines_address_is_one_that_is_served(name: str) -> None:
    """What control and shadow ask goes around the tap, which would take it for traffic."""
    manifests = overlay(name)
    for deployment in ("driftwatch-control", "driftwatch-shadow"):
        (container,) = containers(named(manifests, "Deployment", deployment))
        (url,) = (one["value"] for one in container["env"] if one["name"] == "DRIFTWATCH_ENGINE__URL")
        host, _, port = url.removeprefix("http://").partition(":")
        (served,) = (one for one in named(manifests, "Service", host)["spec"]["ports"] if one["port"] == int(port))
        assert served["targetPort"] == "engine"
        assert dict(engine(manifests).ports)["engine"] == 8000
