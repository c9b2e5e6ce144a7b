"""PIPELINE_COMMAND in a cluster: create a Kubernetes Job for the request in this folder, and wait until it is over.

The Job is job.yaml with its names filled in from the environment (IMAGE, CLAIM, CAPTURE_SERVER, MOONCAKE_SERVER); it
runs train.sh on the same folder. It is created over the API with the service account of this pod (rbac.yaml has what
that needs). A Job of the same name is waited for: a receiver that died had created it.
"""

from __future__ import annotations

import os
import shutil
import string
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

HERE = Path(__file__).parent
ACCOUNT = Path(os.environ.get("ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount"))
API = os.environ.get("API", "https://kubernetes.default.svc")
POLL_S = float(os.environ.get("POLL_S", "10"))


def manifest(run: str, environment: dict[str, str]) -> dict[str, Any]:
    """The Job of one run. Raises KeyError for a name that the environment lacks."""
    filled = string.Template((HERE / "job.yaml").read_text()).substitute(environment | {"RETRAIN": run})
    job: dict[str, Any] = yaml.safe_load(filled)
    return job


def finished(job: dict[str, Any]) -> str | None:
    """Type of the condition that ended a Job, `Complete` or `Failed`; None while it runs."""
    conditions = job.get("status", {}).get("conditions") or []
    ends = [one["type"] for one in conditions if one["type"] in ("Complete", "Failed") and one["status"] == "True"]
    return ends[0] if ends else None


def main() -> None:
    run = Path.cwd().name
    job = manifest(run, dict(os.environ))
    shutil.copy(HERE / "train.sh", "train.sh")
    jobs = f"/apis/batch/v1/namespaces/{(ACCOUNT / 'namespace').read_text().strip()}/jobs"
    verify = str(ACCOUNT / "ca.crt") if API.startswith("https:") else False
    with httpx.Client(base_url=API, verify=verify, timeout=30) as api:

        def call(method: str, path: str, **more: Any) -> httpx.Response:
            token = (ACCOUNT / "token").read_text().strip()  # read each time: it is changed under a running pod
            return api.request(method, path, headers={"authorization": f"Bearer {token}"}, **more)

        created = call("POST", jobs, json=job)
        if created.status_code != 409:
            created.raise_for_status()
        end = None
        while end is None:
            time.sleep(POLL_S)
            end = finished(call("GET", f"{jobs}/{run}").raise_for_status().json())
    if end != "Complete":
        sys.exit(f"job {run}: {end}")


if __name__ == "__main__":
    main()
