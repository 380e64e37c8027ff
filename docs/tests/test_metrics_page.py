# SPDX-License-Identifier: Apache-2.0
"""The page on metrics lists what engines serve, with the labels that they have."""

from __future__ import annotations

import re
from pathlib import Path

from flexkv.figures.definitions import METRICS, Kind
from flexkv.figures.exposition import INFO_NAME
from flexkv.figures.tenant_samples import TENANT_METRICS

PAGE = (Path(__file__).parents[1] / "pages" / "reference" / "metrics.md").read_text(
    encoding="utf-8"
)
TABLES = {Kind.COUNTER: "counter", Kind.GAUGE: "gauge", Kind.HISTOGRAM: "histogram"}


def rows(head: str) -> dict[str, list[str]]:
    """Names in the table with this head, and the labels behind each."""
    (table,) = re.findall(rf"^\| {head} \|.*\n\|[-|]*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    found = re.findall(r"^\| `vllm:flexkv_(\w+)(?:\{([\w,.]*)\})?`", table, re.MULTILINE)
    return {name: labels.split(",") if labels else [] for name, labels in found}


def test_every_metric_is_on_the_page_with_its_labels() -> None:
    for kind, head in TABLES.items():
        listed = rows(head)
        if kind is Kind.GAUGE:
            assert listed.pop(INFO_NAME) == ["version", "..."]
        ending = "_total" if kind is Kind.COUNTER else ""
        assert listed == {
            metric.name + ending: list(metric.label_names)
            for metric in (*METRICS, *TENANT_METRICS)
            if metric.kind is kind
        }
