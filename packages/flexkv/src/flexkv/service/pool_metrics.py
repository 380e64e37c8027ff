# SPDX-License-Identifier: Apache-2.0
"""The service's state as metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from flexkv.figures.definitions import METRICS, Labels, Samples
from flexkv.figures.exposition import INFO_LABELS, INFO_NAME, INFO_TEXT, info_labels
from flexkv.figures.families import families
from flexkv.figures.tenant_samples import TENANT_METRICS
from flexkv.service.state import SERVICE_METRICS, ServiceState
from flexkv.settings import CacheConfig

PREFIX = "service:flexkv_"
"""Begins the names of the service's metrics, as `vllm:flexkv_` begins those of vLLM's engines."""

_POOL = ("pool", "model_name")


def exposition(state: ServiceState, config: CacheConfig) -> bytes:
    """The state as metrics, in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(state, config))
    text: bytes = generate_latest(registry)
    return text


class _Collector:
    def __init__(self, state: ServiceState, config: CacheConfig) -> None:
        self._state = state
        self._config = config

    def collect(self) -> Iterator[Family]:
        """As prometheus_client asks for it."""
        about = GaugeMetricFamily(PREFIX + INFO_NAME, INFO_TEXT, labels=INFO_LABELS)
        about.add_metric(info_labels(self._config), 1)
        yield about
        sources: dict[Labels, Samples] = {
            (pool.fingerprint, pool.model): pool.figures for pool in self._state.pools
        }
        yield from families(PREFIX, _POOL, sources, (*SERVICE_METRICS, *METRICS))
        yield from self._tenants()

    def _tenants(self) -> Iterator[Family]:
        """Of tenants, whose names are not known before."""
        names = [*_POOL, "tenant"]
        has, share = (
            GaugeMetricFamily(PREFIX + metric.name, metric.text, labels=names)
            for metric in TENANT_METRICS
        )
        for pool in self._state.pools:
            for each in pool.tenants:
                if each.name:
                    labels = (pool.fingerprint, pool.model, each.name)
                    has.add_metric(labels, each.blocks)
                    share.add_metric(labels, each.share)
        yield from (family for family in (has, share) if family.samples)
