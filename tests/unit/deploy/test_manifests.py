"""The manifests: rendered by kubectl's own kustomize, held against strict schemas, then against our own rules."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.prometheus_operator import v1 as operator

from driftwatch.settings import load

DEPLOY = Path(__file__).parents[3] / "deploy"
KUSTOMIZE = DEPLOY / "kustomize"
OVERLAYS = sorted(path.name for path in (KUSTOMIZE / "overlays").iterdir())
VERSIONS = ("1.29", "1.33", "1.37")
OPERATOR = "monitoring.coreos.com/v1"
GPU_COMPONENTS = {"mig-slice": "nvidia.com/mig-1g.10gb", "shared-gpu": "nvidia.com/gpu.shared"}

Manifest = dict[str, Any]


@cache
def rendered(folder: Path) -> tuple[Manifest, ...]:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
    return tuple(document for document in yaml.safe_load_all(done.stdout) if document)


def overlay(name: str) -> tuple[Manifest, ...]:
    return rendered(KUSTOMIZE / "overlays" / name)


def with_component(tmp_path: Path, component: str) -> tuple[Manifest, ...]:
    """The vLLM overlay with one component more, as a user would add it."""
    copy = tmp_path / "kustomize"
    subprocess.run(["cp", "-r", str(KUSTOMIZE), str(copy)], check=True)
    file = copy / "overlays/vllm/kustomization.yaml"
    file.write_text(file.read_text().replace("components:\n", f"components:\n  - ../../components/{component}\n"))
    # After the tap's patch, so that it sees what the tap made.
    text = yaml.safe_load(file.read_text())
    text["components"] = [*text["components"][1:], text["components"][0]]
    file.write_text(yaml.safe_dump(text))
    return rendered(file.parent)


def kind(manifests: tuple[Manifest, ...], wanted: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == wanted]


def named(manifests: tuple[Manifest, ...], wanted: str, name: str) -> Manifest:
    return next(manifest for manifest in kind(manifests, wanted) if manifest["metadata"]["name"] == name)


def pod_of(deployment: Manifest) -> Manifest:
    pod: Manifest = deployment["spec"]["template"]["spec"]
    return pod


def containers(deployment: Manifest) -> list[Manifest]:
    return [*pod_of(deployment).get("initContainers", []), *pod_of(deployment)["containers"]]


def settings_in(manifests: tuple[Manifest, ...]) -> Manifest:
    """The file in the ConfigMap that all processes read."""
    (config,) = (one for one in kind(manifests, "ConfigMap") if "settings.yaml" in one["data"])
    settings: Manifest = yaml.safe_load(config["data"]["settings.yaml"])
    return settings


def ours(manifests: tuple[Manifest, ...]) -> Iterator[Manifest]:
    """Containers of driftwatch itself, not the engines they stand beside."""
    for deployment in kind(manifests, "Deployment"):
        yield from (one for one in containers(deployment) if one["image"].startswith("driftwatch"))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", OVERLAYS)
def test_strict_schemas(name: str, version: str) -> None:
    for manifest in overlay(name):
        if manifest["apiVersion"] != OPERATOR:
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("name", OVERLAYS)
def test_operator_resources(name: str) -> None:
    """The operator's own schemas; a key that they drop on the way is a typing error."""
    found = [manifest for manifest in overlay(name) if manifest["apiVersion"] == OPERATOR]
    assert {manifest["kind"] for manifest in found} == {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    for manifest in found:
        model = getattr(operator, manifest["kind"]).model_validate(manifest)
        assert model.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True) == manifest


@pytest.mark.parametrize("name", OVERLAYS)
def test_security(name: str) -> None:
    manifests = overlay(name)
    for deployment in kind(manifests, "Deployment"):
        pod = pod_of(deployment)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert all(not one["securityContext"]["allowPrivilegeEscalation"] for one in containers(deployment))
        assert all(one["securityContext"]["capabilities"] == {"drop": ["ALL"]} for one in containers(deployment))
        assert all(":" in one["image"] and not one["image"].endswith(":latest") for one in containers(deployment))
        own = pod["containers"][0]["image"].startswith("driftwatch")
        for one in containers(deployment):
            if one["image"].startswith("driftwatch"):
                context = pod["securityContext"] | one["securityContext"] if own else one["securityContext"]
                assert context["readOnlyRootFilesystem"] is True
                assert context["runAsNonRoot"] is True
                assert context["runAsUser"] >= 10000
    assert not kind(manifests, "Role") + kind(manifests, "ClusterRole"), "driftwatch asks nothing of the API server"


@pytest.mark.parametrize("name", OVERLAYS)
def test_limits_and_probes(name: str) -> None:
    for container in ours(overlay(name)):
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            (how,) = (container[probe].get(key) for key in ("httpGet", "tcpSocket") if key in container[probe])
            assert how["port"] in ports


@pytest.mark.parametrize("name", OVERLAYS)
def test_selectors_match(name: str) -> None:
    manifests = overlay(name)
    pods = [(one["spec"]["template"]["metadata"]["labels"], one) for one in kind(manifests, "Deployment")]

    def chosen(selector: dict[str, str]) -> list[Manifest]:
        return [one for labels, one in pods if selector.items() <= labels.items()]

    def port_names(deployments: list[Manifest]) -> set[str]:
        return {port["name"] for one in deployments for each in containers(one) for port in each.get("ports", [])}

    for deployment in kind(manifests, "Deployment"):
        assert deployment in chosen(deployment["spec"]["selector"]["matchLabels"])
    for service in kind(manifests, "Service"):
        behind = chosen(service["spec"]["selector"])
        assert behind
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= port_names(behind)
    for budget in kind(manifests, "PodDisruptionBudget"):
        assert chosen(budget["spec"]["selector"]["matchLabels"])
    for policy in kind(manifests, "NetworkPolicy"):
        behind = chosen(policy["spec"]["podSelector"]["matchLabels"])
        assert behind
        wanted = {port["port"] for rule in policy["spec"].get("ingress", []) for port in rule["ports"]}
        assert wanted <= port_names(behind)
    for monitor in kind(manifests, "PodMonitor"):
        behind = chosen(monitor["spec"]["selector"]["matchLabels"])
        assert behind
        assert {one["port"] for one in monitor["spec"]["podMetricsEndpoints"]} <= port_names(behind)
    for monitor in kind(manifests, "ServiceMonitor"):
        wanted_labels = monitor["spec"]["selector"]["matchLabels"].items()
        services = [one for one in kind(manifests, "Service") if wanted_labels <= one["metadata"]["labels"].items()]
        assert services
        names = {port["name"] for one in services for port in one["spec"]["ports"]}
        assert {one["port"] for one in monitor["spec"]["endpoints"]} <= names
    for scaler in kind(manifests, "HorizontalPodAutoscaler"):
        assert named(manifests, "Deployment", scaler["spec"]["scaleTargetRef"]["name"])


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_tap_is_a_native_sidecar_in_the_way_of_the_service(name: str) -> None:
    manifests = overlay(name)
    tapped = [one for one in kind(manifests, "Deployment") if one["metadata"]["labels"].get("driftwatch.io/tap")]
    assert tapped
    for deployment in tapped:
        (tap,) = pod_of(deployment)["initContainers"]
        assert tap["restartPolicy"] == "Always"
        assert "tcpSocket" in tap["startupProbe"], "the engine must not wait for more than a bound port"
        assert not any("STORE" in variable["name"] for variable in tap["env"]), "the tap knows no database"
        (engine,) = pod_of(deployment)["containers"]
        pause = engine["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod_of(deployment)["terminationGracePeriodSeconds"] > pause + 30
        service = named(manifests, "Service", deployment["metadata"]["name"])
        assert service["spec"]["ports"][0]["targetPort"] == "http"
        secret = next(v["secret"] for v in pod_of(deployment)["volumes"] if v["name"] == "driftwatch-token")
        assert [item["key"] for item in secret["items"]] == ["token"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_settings_are_settings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file in the ConfigMap, with each container's own environment, is accepted by driftwatch itself."""
    manifests = overlay(name)
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(settings_in(manifests)))
    for container in ours(manifests):
        with monkeypatch.context() as patch:
            for variable in container["env"]:
                value = variable.get("value", "postgresql+psycopg://user:secret@host/driftwatch")
                patch.setenv(variable["name"], value)
            settings = load(path)
        ports = {port["containerPort"] for port in container["ports"]}
        if container["name"] == "driftwatch-tap":
            listening = (settings.tap.listen, settings.tap.admin)
            engine = next(one for one in ("vllm", "sglang", "tensorrt") if name.startswith(one))
            assert settings.engine.kind == {"tensorrt": "trtllm"}.get(engine, engine)
        elif container["name"] == "control":
            assert settings.control.metrics_listen is not None
            listening = (settings.control.listen, settings.control.metrics_listen)
        else:
            continue
        assert {int(listen.rpartition(":")[2]) for listen in listening} == ports


def test_bypass_takes_the_tap_out_of_the_way(tmp_path: Path) -> None:
    manifests = with_component(tmp_path, "bypass")
    service = named(manifests, "Service", "vllm")["spec"]
    assert service["ports"][0]["targetPort"] == "engine"
    assert service["publishNotReadyAddresses"] is True, "a dead tap makes its pod not ready"
    kubernetes_validate.validate(named(manifests, "Service", "vllm"), VERSIONS[-1], strict=True)
    assert named(manifests, "Deployment", "vllm") == named(overlay("vllm"), "Deployment", "vllm")


def test_live_only_has_no_shadow_and_no_work_for_one(tmp_path: Path) -> None:
    manifests = with_component(tmp_path, "live-only")
    names = {one["metadata"]["name"] for one in manifests if one["kind"] != "PodMonitor"}
    assert "driftwatch-shadow" not in names
    assert "driftwatch-control" in names
    live, base = (settings_in(one) for one in (manifests, overlay("vllm")))
    assert [draft.get("path") for model in live["models"] for draft in model["drafts"]] == [None]
    assert {key: value for key, value in live.items() if key != "models"} == {
        key: value for key, value in base.items() if key != "models"
    }


def test_pipelines_report_to_controls_service() -> None:
    """Where nothing is set, they would be told the address that control binds to."""
    url = settings_in(overlay("vllm"))["retrain"]["callback_url"]
    host, _, port = url.removeprefix("http://").partition(":")
    assert int(port) in {one["port"] for one in named(overlay("vllm"), "Service", host)["spec"]["ports"]}


@pytest.mark.parametrize("name", OVERLAYS)
def test_all_that_is_ours_is_found_by_one_label(name: str) -> None:
    """By which it is removed; the engine and what belongs to it are not."""
    kinds = set()
    for one in overlay(name):
        labelled = one["metadata"].get("labels", {}).get("app.kubernetes.io/part-of") == "driftwatch"
        assert labelled == one["metadata"]["name"].startswith("driftwatch"), one["metadata"]["name"]
        kinds |= {one["kind"].lower()} if labelled else set()
    commands = re.findall(r"^kubectl .*delete (\S+) -l", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    assert kinds == {kind for command in commands for kind in command.split(",")}


@pytest.mark.parametrize(("component", "resource"), GPU_COMPONENTS.items())
def test_other_kinds_of_gpu(tmp_path: Path, component: str, resource: str) -> None:
    manifests = with_component(tmp_path, component)
    shadow = named(manifests, "Deployment", "driftwatch-shadow")
    limits = pod_of(shadow)["containers"][0]["resources"]["limits"]
    assert [name for name in limits if name.startswith("nvidia.com/")] == [resource]
    kubernetes_validate.validate(shadow, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_shadow_gives_way_and_still_gets_a_node(name: str) -> None:
    """Pods below -10 are expendable to the cluster autoscaler: it starts no node for them."""
    (priority,) = kind(overlay(name), "PriorityClass")
    assert -10 <= priority["value"] < 0
    assert priority["preemptionPolicy"] == "Never"
    shadow = pod_of(named(overlay(name), "Deployment", "driftwatch-shadow"))
    assert shadow["priorityClassName"] == priority["metadata"]["name"]


def test_vllm_gives_its_own_figures_of_each_request() -> None:
    """Asked for at its start alone, since 0.29.0; one that does not speculate refuses the option."""
    for name, wanted in (("vllm", True), ("vllm-decode", True), ("vllm-prefill", False)):
        manifests = overlay("vllm" if name == "vllm" else "vllm-disaggregated")
        (engine,) = pod_of(named(manifests, "Deployment", name))["containers"]
        assert ("--per-request-spec-decode-metrics=summary" in engine["args"]) is wanted
        assert any(one.startswith("--speculative-config") for one in engine["args"]) is wanted


def test_the_engine_of_a_disaggregated_prefill_is_not_tapped() -> None:
    prefill = named(overlay("vllm-disaggregated"), "Deployment", "vllm-prefill")
    assert "initContainers" not in pod_of(prefill)
