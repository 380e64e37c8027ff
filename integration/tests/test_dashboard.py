# SPDX-License-Identifier: Apache-2.0
"""A real engine, scraped by a real Prometheus: every query of the dashboard returns data."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dashboards.names import Names
from dashboards.panels import rows
from flexkv.figures.definitions import METRICS
from integration.harness.config import EngineConfig
from integration.harness.host import EngineHost
from integration.harness.prometheus import HOW, INSTALLED, Prometheus
from integration.harness.server import Server
from integration.tests.corpus import FLEXKV_BLOCK, tokens

pytestmark = pytest.mark.skipif(not INSTALLED, reason=HOW)

NAMES = Names("vllm:flexkv_", 'model_name=~".*", instance=~".*"', "10m", "10m")
ALERTS = Path(__file__).parents[2] / "dashboards" / "alerts.yml"
PROMPTS = [tokens(f"dashboard {i}", 15 * FLEXKV_BLOCK + 7) for i in range(12)]
"""More than host memory holds: the first are fetched from disk."""
WAIT_SECONDS = 600.0


def test_every_panel_has_data(
    host: EngineHost, disk_config: Callable[..., EngineConfig], work_dir: Path
) -> None:
    host.close()  # one engine at a time
    config = disk_config(work_dir / "dashboard-disk", probe=False, forked=False)
    of_stores = {m.name for m in METRICS if m.media and all(each.is_shared for each in m.media)}
    queries = {
        f"{row.title}: {panel.title}: {query.legend}": query.expr
        for row in rows(NAMES)
        for panel in row.panels
        for query in panel.queries
        if not any(name in query.expr for name in of_stores)  # this engine has none
    }
    assert of_stores == {"late_questions"}
    with Server(config, work_dir / "logs" / "dashboard.log", None) as server:
        target = ":".join(map(str, server.address))
        with Prometheus(target, ALERTS, work_dir / "prometheus") as prometheus:
            for prompt in PROMPTS:
                server.generate(prompt)
            server.reset_prefix_cache(external=False)
            server.generate(PROMPTS[-1])
            server.reset_prefix_cache(external=False)
            deadline = time.monotonic() + WAIT_SECONDS
            while empty := [
                name for name, expr in queries.items() if not has_data(prometheus, expr)
            ]:
                assert time.monotonic() < deadline, empty
                # Blocks reach the disk in their own time.
                for prompt in PROMPTS:
                    server.generate(prompt)
                    server.reset_prefix_cache(external=False)
            assert prometheus.query("sum(increase(vllm:flexkv_hit_blocks_count[10m]))")[0] > 0
            health = prometheus.rules()
    assert health
    assert {each for rules in health.values() for each in rules} <= {"ok", "unknown"}
    assert len(queries) > len(METRICS) // 2


def has_data(prometheus: Prometheus, expr: str) -> bool:
    """Whether a query has a number."""
    return any(not math.isnan(value) for value in prometheus.query(expr))
