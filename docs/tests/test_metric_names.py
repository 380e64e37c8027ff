# SPDX-License-Identifier: Apache-2.0
"""Whatever a page looks for at `/metrics` is there under that name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flexkv.figures.definitions import METRICS, Kind
from flexkv.figures.exposition import INFO_NAME
from flexkv.figures.tenant_samples import TENANT_METRICS
from flexkv.service.state import SERVICE_METRICS

PAGES = Path(__file__).parents[1] / "pages"
ENDINGS = {
    Kind.COUNTER: ("_total",),
    Kind.GAUGE: ("",),
    Kind.HISTOGRAM: ("", "_bucket", "_count", "_sum"),
}
NAMES = {
    metric.name + end
    for metric in (*METRICS, *SERVICE_METRICS, *TENANT_METRICS)
    for end in ENDINGS[metric.kind]
} | {INFO_NAME}
NAME = re.compile(r"\b(?:vllm|sglang|service):flexkv_([a-z_]+)\b(?!\.\.\.)")
WITH_NAMES = [page for page in sorted(PAGES.rglob("*.md")) if NAME.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_NAMES, ids=lambda page: str(page.relative_to(PAGES)))
def test_metrics_on_pages_exist(page: Path) -> None:
    assert set(NAME.findall(page.read_text(encoding="utf-8"))) - NAMES == set()


def test_the_page_of_the_service_lists_its_own_metrics() -> None:
    page = (PAGES / "guides" / "node.md").read_text(encoding="utf-8")
    own = {metric.name + ENDINGS[metric.kind][0] for metric in SERVICE_METRICS}
    assert set(re.findall(r"^\| `service:flexkv_(\w+)`", page, re.MULTILINE)) == own


def test_pages_name_metrics() -> None:
    assert PAGES / "guides" / "observe.md" in WITH_NAMES
    assert NAME.findall("vllm:flexkv_nothing_total") == ["nothing_total"]
