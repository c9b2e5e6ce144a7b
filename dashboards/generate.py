"""Writes the Grafana dashboards: ``python dashboards/generate.py [FOLDER]``. A test holds the committed files to it.

The data source is a variable, so that a file can be imported anywhere.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from charts import ITSELF, LIVE_CELL, ONE_SEGMENT, OVERVIEW, Chart, Rows, opened
from grafana_foundation_sdk.builders import common, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as styles
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

FOLDER = Path(__file__).parent
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "driftwatch"
CELL_VARIABLES = {
    "model": "Model",
    "draft": "Draft",
    "segment": "Segment",
    "split": "On or off the training distribution",
}
STATES = '{__name__=~"driftwatch_(live_)?baseline_state"}'
"""Cells of every kind have a state: also where the engine's own figures are all that is known."""


def panel(chart: Chart) -> Any:
    kinds: dict[str, Any] = {"timeseries": timeseries.Panel, "stat": stat.Panel, "table": table.Panel}
    build = kinds[chart.kind]()
    build.title(chart.title).description(chart.description).unit(chart.unit).datasource(SOURCE)
    build.span(chart.width).height(chart.height).thresholds(
        builders.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=colour) for value, colour in chart.steps])
    )
    if chart.kind == "timeseries":
        _draw(build, with_thresholds=len(chart.steps) > 1)
    if chart.maximum is not None:
        build.min(0).max(chart.maximum)
    for letter, query in zip("ABCDEFGH", chart.queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(letter).datasource(SOURCE)
        newest = target.instant().format(
            PromQueryFormat.TABLE if chart.kind == "table" else PromQueryFormat.TIME_SERIES
        )
        build.with_target(target.range() if chart.kind == "timeseries" else newest)
    return build


def _draw(build: timeseries.Panel, *, with_thresholds: bool) -> None:
    """Lines with a legend of last values; the limits of an interval are thin and dashed."""
    build.fill_opacity(0).show_points(styles.VisibilityMode.NEVER)
    build.legend(
        common.VizLegendOptions()
        .display_mode(styles.LegendDisplayMode.TABLE)
        .placement(styles.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["lastNotNull"])
    )
    build.tooltip(common.VizTooltipOptions().mode(styles.TooltipDisplayMode.MULTI))
    if with_thresholds:
        build.thresholds_style(common.GraphThresholdsStyleConfig().mode(styles.GraphThresholdsStyleMode.DASHED))
    dashes = {"fill": "dash", "dash": [4, 4]}
    build.override_by_regexp(
        "/ (lower|upper)$/",
        [
            models.DynamicConfigValue(id_val="custom.lineStyle", value=dashes),
            models.DynamicConfigValue(id_val="custom.lineWidth", value=1),
        ],
    )


def dashboard(uid: str, title: str, description: str, rows: Rows, variables: dict[str, str]) -> builders.Dashboard:
    build = builders.Dashboard(title).uid(uid).description(description).tags([TAG]).refresh("1m").time("now-24h", "now")
    build.timezone("browser").editable().tooltip(models.DashboardCursorSync.CROSSHAIR)
    others = builders.DashboardLink("driftwatch").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    build.link(others.as_dropdown(True).include_vars(True).keep_time(True))
    build.with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    for name, label in variables.items():
        query = f"label_values({STATES}, {name})"
        build.with_variable(
            builders.QueryVariable(name)
            .label(label)
            .datasource(SOURCE)
            .query({"query": query, "refId": name})
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
            .include_all(True)
            .all_value(".*")
            .multi(True)
        )
    events = builders.AnnotationQuery().name("Open events").datasource(SOURCE).enable(True).icon_color("red")
    build.annotation(events.expr(opened(LIVE_CELL if variables else "")))
    for heading, charts in rows:
        build.with_row(builders.Row(heading))
        for chart in charts:
            build.with_panel(panel(chart))
    return build


def dashboards() -> dict[str, str]:
    """File name -> text."""
    built = {
        "overview": dashboard(
            "driftwatch-overview",
            "driftwatch / Overview",
            "Is speculative decoding worth it, where is it not, and since when?",
            OVERVIEW,
            CELL_VARIABLES,
        ),
        "segment": dashboard(
            "driftwatch-segment",
            "driftwatch / Segment",
            "One cell: acceptance with its interval, the tail, and what changed.",
            ONE_SEGMENT,
            CELL_VARIABLES,
        ),
        "driftwatch": dashboard(
            "driftwatch-itself",
            "driftwatch / driftwatch itself",
            "Tap, shadow, control: do they do their work?",
            ITSELF,
            {},
        ),
    }
    found = {}
    for name, builder in built.items():
        model = json.loads(json.dumps(builder.build(), cls=JSONEncoder))
        for number, one in enumerate(model["panels"], 1):
            one["id"] = number
        for variable in model["templating"]["list"]:  # of intervals only, and not in Grafana's own types
            for key in ("auto", "auto_count", "auto_min"):
                variable.pop(key, None)
        found[f"{name}.json"] = json.dumps(model, indent=2, sort_keys=True) + "\n"
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for name, text in dashboards().items():
        (folder / name).write_text(text)
