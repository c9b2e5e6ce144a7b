"""What PromQL names, and what driftwatch exports: the two must agree."""

from __future__ import annotations

from pathlib import Path

import promql_parser
from prometheus_client import CollectorRegistry

from driftwatch.control.metrics import registry as of_control
from driftwatch.settings import Governor as Limits
from driftwatch.settings import Settings
from driftwatch.shadow.governor import Governor
from driftwatch.shadow.metrics import GovernorCollector
from driftwatch.store import migrate
from driftwatch.store.connection import Store
from driftwatch.tap.metrics import Metrics

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",), "summary": ("",)}


def selected(expression: str) -> set[str]:
    """Names of the metrics that an expression reads. Raises ValueError if it is no PromQL."""
    found: set[str] = set()

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name is not None, expression
            found.add(node.name)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def exported(folder: Path) -> set[str]:
    """Names of the series that control, tap and shadow can export."""
    store = Store(f"sqlite:///{folder / 'driftwatch.db'}")
    migrate.upgrade(store)
    shadow = CollectorRegistry(auto_describe=False)
    shadow.register(GovernorCollector(Governor(Limits(), lambda _: False, free_bytes=lambda: 1)))
    families = [f for one in (of_control(store, Settings()), Metrics().registry, shadow) for f in one.collect()]
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}
