# SPDX-License-Identifier: Apache-2.0
"""The dashboard: current, for Grafana and Prometheus to read, and of metrics that engines serve."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dashboards import names, panels
from dashboards.names import Names
from dashboards.panels import Shape, rows
from flexkv import CacheConfig
from flexkv.figures.definitions import CIRCUITS, METRICS, Kind, Metric, sample
from flexkv.figures.exposition import Exposition
from flexkv.types.changes import BELOW

FOLDER = Path(__file__).parents[1]
BOARD = FOLDER / "flexkv.json"
NAMES = Names("vllm:flexkv_", "", "5m", "1h")


def board() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(BOARD.read_text(encoding="utf-8"))
    return content


def expressions() -> list[str]:
    """Of all panels."""
    return [target["expr"] for panel in board()["panels"] for target in panel.get("targets", ())]


def served() -> set[str]:
    """Names of the series that an engine with all tiers serves, as Prometheus stores them."""
    registry = CollectorRegistry()
    counter, gauge, histogram = (
        functools.partial(make, registry=registry) for make in (Counter, Gauge, Histogram)
    )
    made = Exposition(
        "flexkv_",
        counter,
        gauge,
        histogram,
        label_names=["model_name"],
        engines={0: ["m"]},
        config=CacheConfig(),
    )
    made.observe({sample(CIRCUITS.name, each.value, "read", "closed"): 1.0 for each in BELOW}, 0)
    return {each.name for family in registry.collect() for each in family.samples}


def test_the_file_is_current() -> None:
    grafana = pytest.importorskip("dashboards.grafana", reason="grafana-foundation-sdk is missing")
    assert BOARD.read_text(encoding="utf-8") == grafana.dashboard_json()


def test_every_metric_that_is_named_exists() -> None:
    alerts = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))
    rules = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    variables = [str(each.get("query")) for each in board()["templating"]["list"]]
    text = "\n".join((*expressions(), *rules, *variables))
    named = set(re.findall(r":(flexkv_\w+)", text))
    assert named
    assert named <= served()
    assert not re.search(r"(?<![:\w])flexkv_", text)  # without the engine's prefix


def test_every_metric_is_shown() -> None:
    text = "\n".join(expressions())
    endings = ("_created", "_sum", "_count")
    wanted = {name for name in served() if not name.endswith(endings)}
    assert {name for name in wanted if f":{name}{{" not in text} == set()


def test_a_metric_without_a_panel_is_in_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = ("tier",)
    new = (
        Metric(Kind.COUNTER, "lost_blocks", "Lost.", labels, counted=(("disk",),)),
        Metric(Kind.GAUGE, "idle_ranks", "Idle.", counted=((),)),
        Metric(Kind.HISTOGRAM, "wait_seconds", "Waits.", labels, (("disk",),), bounds=(1.0,)),
    )
    monkeypatch.setattr(panels, "METRICS", (*METRICS, *new))
    monkeypatch.setattr(names, "_METRICS", {each.name: each for each in new} | names._METRICS)
    row = rows(NAMES)[-1]
    assert row.title == "Others"
    assert [panel.queries[0].expr for panel in row.panels[-3:]] == [
        "sum by (tier) (rate(vllm:flexkv_lost_blocks_total[5m]))",
        "sum by () (vllm:flexkv_idle_ranks)",
        "histogram_quantile(0.99, sum by (le, tier) (rate(vllm:flexkv_wait_seconds_bucket[5m])))",
    ]
    assert [panel.queries[0].legend for panel in row.panels[-3:]] == [
        "{{tier}}",
        "idle_ranks",
        "{{tier}}",
    ]


def test_a_wrong_name_is_refused() -> None:
    for name, labels in (
        ("hit_rate", {}),
        ("hit_tokens", {"tiers": "host"}),
        ("hit_tokens", {"tier": "host|tape"}),
    ):
        with pytest.raises(ValueError, match="allowed"):
            NAMES.series(name, **labels)


def test_panels_fill_the_grid_and_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in board()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        cells |= own
    rows_used = {y for _, y in cells}
    assert len(cells) == 24 * len(rows_used)


def test_panels_say_what_they_show() -> None:
    for row in rows(NAMES):
        for panel in row.panels:
            assert panel.text.endswith("."), panel.title
            assert len({query.legend for query in panel.queries}) == len(panel.queries)
            if panel.shape is Shape.NUMBER:
                assert len(panel.queries) == 1


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing (Debian: apt install prometheus)"
)
def test_prometheus_parses_every_query(tmp_path: Path) -> None:
    """As rules, whose expressions promtool parses; with values for Grafana's variables."""
    values = {"${engine}": "vllm", "$__rate_interval": "1m", "$__range": "1h"}
    rules = []
    for place, expr in enumerate(expressions()):
        filled = functools.reduce(lambda text, pair: text.replace(*pair), values.items(), expr)
        rules.append({"record": f"panel:{place}", "expr": filled})
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    command = ["promtool", "check", "rules", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
