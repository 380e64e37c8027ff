# SPDX-License-Identifier: Apache-2.0
"""What a Prometheus server gets of FlexKV's metrics."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from flexkv_vllm.connector import FlexKVConnectorV1


def scrape(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Values by name and labels, without vLLM's own labels."""
    text = generate_latest(registry).decode()
    return {
        (each.name, tuple(sorted(p for p in each.labels.items() if p[0] != "model_name"))): (
            each.value
        )
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if not each.name.endswith("_created")
    }


def metrics(
    registry: CollectorRegistry, engines: int = 1, settings: dict[str, Any] | None = None
) -> Any:
    types: Any = {
        Counter: functools.partial(Counter, registry=registry),
        Gauge: functools.partial(Gauge, registry=registry),
        Histogram: functools.partial(Histogram, registry=registry),
    }
    values: dict[int, list[object]] = {i: ["model", str(i)] for i in range(engines)}
    transfer = SimpleNamespace(kv_connector_extra_config=settings or {})
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    return FlexKVConnectorV1.build_prom_metrics(config, types, ["model_name", "engine"], values)
