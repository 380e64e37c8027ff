# SPDX-License-Identifier: Apache-2.0
"""The dashboard as Grafana imports it, made with Grafana's own library."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
)

from dashboards.names import Names
from dashboards.panels import Panel, Row, Shape, rows

ENGINES = ("vllm", "sglang")
SCOPE = 'model_name=~"$model", instance=~"$instance"'
NAMES = Names("${engine}:flexkv_", SCOPE, "$__rate_interval", "$__range")
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_WIDTH = 24
"""Columns of Grafana's grid."""
_HEIGHT = {Shape.NUMBER: 4, Shape.LINES: 8, Shape.STACK: 8}


def dashboard_json() -> str:
    """The dashboard, ending with a newline."""
    made = (
        dashboard.Dashboard("FlexKV")
        .uid("flexkv")
        .description("KV cache of LLM engines past GPU memory: hits, latency, room, failures.")
        .tags(["flexkv", "llm"])
        .refresh("30s")
        .time("now-1h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
    )
    for variable in _variables():
        made = made.with_variable(variable)
    for row in rows(NAMES):
        made = made.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            made = made.with_panel(_panel(panel, row))
    text: str = JSONEncoder(sort_keys=True, indent=2).encode(made.build())
    return text + "\n"


def _variables() -> list[Any]:
    models = f"label_values({NAMES.prefix}info, model_name)"
    instances = f'label_values({NAMES.prefix}info{{model_name=~"$model"}}, instance)'
    return [
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        dashboard.CustomVariable("engine")
        .label("Engine")
        .values(",".join(ENGINES))
        .current(VariableOption(selected=True, text=ENGINES[0], value=ENGINES[0])),
        _of_labels("model", "Model", models),
        _of_labels("instance", "Instance", instances),
    ]


def _of_labels(name: str, label: str, query: str) -> Any:
    """A variable with the values of a label; all of them at first."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(_SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )


def _panel(panel: Panel, row: Row) -> Any:
    made: Any = stat.Panel() if panel.shape is Shape.NUMBER else _lines(panel)
    made = (
        made.title(panel.title)
        .description(panel.text)
        .unit(panel.unit)
        .datasource(_SOURCE)
        .height(_HEIGHT[panel.shape])
        .span(_span(panel, row))
    )
    for place, query in enumerate(panel.queries):
        made = made.with_target(
            prometheus.Dataquery()
            .expr(query.expr)
            .legend_format(query.legend)
            .ref_id(chr(ord("A") + place))
            .datasource(_SOURCE)
        )
    return made


def _lines(panel: Panel) -> Any:
    made = (
        timeseries.Panel()
        .min(0)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if panel.shape is Shape.STACK:
        made = made.fill_opacity(30).stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    return made


def _span(panel: Panel, row: Row) -> int:
    """Columns of a panel: its row has up to three beside each other."""
    same = [
        each for each in row.panels if (each.shape is Shape.NUMBER) == (panel.shape is Shape.NUMBER)
    ]
    beside = same[same.index(panel) // 3 * 3 :][:3]
    return _WIDTH // len(beside)
