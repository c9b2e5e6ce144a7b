"""A real Prometheus and a real Alertmanager beside the processes of a test, with windows short enough to wait for.

The rules and the Alertmanager example are the files that users apply. What is changed, here and nowhere else: durations
(WINDOWS; every ``for`` and ``keep_firing_for`` becomes a second), the counts and ages that go with them (LIMITS), and
where the receiver is.
"""

from __future__ import annotations

import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import yaml

from tests.e2e.machine import Machine, free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "kustomize/components/monitoring/rules.yaml"
ALERTMANAGER = DEPLOY / "alertmanager.yaml"
TOKEN = "the receiver's token"

WINDOWS = {
    "5m": "6s",
    "10m": "6s",
    "15m": "6s",
    "30m": "8s",
    "1h": "10s",
    "6h": "12s",
    "24h": "15s",
    "1d": "15s",
    "3d": "15s",
}
LIMITS = {"max(driftwatch_shadow_lag_seconds) > 3600": "max(driftwatch_shadow_lag_seconds) > 3", ">= 100": ">= 3"}


def short_rules() -> dict[str, Any]:
    """The groups of the PrometheusRule with everything shortened."""
    groups = yaml.safe_load(RULES.read_text())["spec"]["groups"]
    for group in groups:
        group["interval"] = "1s"
        for rule in group["rules"]:
            expr = re.sub(r"(?<=\[)\w+(?=\])|(?<=offset )\w+", lambda found: WINDOWS[found[0]], rule["expr"])
            for limit, shorter in LIMITS.items():
                expr = expr.replace(limit, shorter)
            rule |= {"expr": expr} | {key: "1s" for key in ("for", "keep_firing_for") if key in rule}
    return {"groups": groups}


def short_alertmanager(receiver: str, token: Path) -> str:
    """The example, to this receiver, with waits of a second at most."""
    text = ALERTMANAGER.read_text().replace("http://alert-receiver:9000", receiver)
    text = text.replace("/etc/alertmanager/receiver-token", str(token))
    return re.sub(r"(group_wait|group_interval): \w+", r"\1: 1s", text)


class Receiver:
    """What Alertmanager sends to, and driftwatch's own webhooks: keeps the newest state of each alert."""

    def __init__(self) -> None:
        self.alerts: dict[str, dict[str, Any]] = {}
        """By fingerprint: the alert as it was sent last, with the receiver's path."""
        self.hooks: list[dict[str, Any]] = []
        self.hook_status = 204
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                self.send_response(receiver.take(self.path, self.headers.get("authorization"), body))
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = Thread(target=self.server.serve_forever)
        self.thread.start()

    def take(self, path: str, authorization: str | None, body: bytes) -> int:
        message = httpx.Response(200, content=body).json()
        if path == "/hook":
            self.hooks.append(message)
            return self.hook_status
        if authorization != f"Bearer {TOKEN}":
            return 401
        for alert in message["alerts"]:
            self.alerts[alert["fingerprint"]] = alert | {"path": path}
        return 200

    def told(self, name: str, **labels: str) -> list[dict[str, Any]]:
        """Alerts of this name with these labels, each as it was sent last."""
        wanted = {"alertname": name} | labels
        return [alert for alert in list(self.alerts.values()) if wanted.items() <= alert["labels"].items()]

    def firing(self, name: str, **labels: str) -> list[dict[str, Any]]:
        return [alert for alert in self.told(name, **labels) if alert["status"] == "firing"]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class Prometheus:
    """Scrapes a machine's processes as the PodMonitors and the ServiceMonitor would, and sends to Alertmanager."""

    def __init__(self, machine: Machine, receiver: Receiver) -> None:
        self.url, alertmanager = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        folder = machine.folder
        (folder / "rules.yaml").write_text(yaml.safe_dump(short_rules()))
        (folder / "receiver-token").write_text(TOKEN)
        (folder / "alertmanager.yaml").write_text(short_alertmanager(receiver.url, folder / "receiver-token"))
        targets = {"driftwatch-control": "control", "driftwatch-tap": "admin", "driftwatch-shadow": "shadow"}
        jobs = [
            {"job_name": f"inference/{job}", "static_configs": [{"targets": [f"127.0.0.1:{machine.ports[port]}"]}]}
            for job, port in targets.items()
        ]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": jobs,
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager.removeprefix("http://")]}]}]},
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        machine.start(
            "alertmanager",
            "prometheus-alertmanager",
            "--config.file=alertmanager.yaml",
            "--storage.path=alertmanager",
            f"--web.listen-address={alertmanager.removeprefix('http://')}",
            "--cluster.listen-address=",
        )
        machine.start(
            "prometheus",
            "prometheus",
            "--config.file=prometheus.yaml",
            "--storage.tsdb.path=prometheus",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        )
        machine.wait_for(f"{alertmanager}/-/ready")
        machine.wait_for(f"{self.url}/-/ready")
        self._client = httpx.Client(base_url=self.url, timeout=30, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def _get(self, path: str, **parameters: str) -> Any:
        answer = self._client.get(f"/api/v1/{path}", params=parameters)
        assert answer.is_success, answer.text
        return answer.json()["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def label_values(self, selector: str, label: str) -> list[str]:
        """What Grafana asks for ``label_values(selector, label)``."""
        found: list[str] = self._get(f"label/{label}/values", **{"match[]": selector})
        return found

    def names(self) -> set[str]:
        return set(self._get("label/__name__/values"))

    def firing(self, name: str) -> bool:
        return bool(self.query(f'ALERTS{{alertname="{name}",alertstate="firing"}}'))
