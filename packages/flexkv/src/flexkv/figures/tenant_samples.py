# SPDX-License-Identifier: Apache-2.0
"""Metrics of tenants, whose names are those of the setting `tenant_shares`."""

from __future__ import annotations

from collections.abc import Iterable

from flexkv.figures.definitions import Kind, Metric, Samples, sample

TENANT_BLOCKS = Metric(
    Kind.GAUGE,
    "tenant_blocks",
    "FlexKV blocks of host memory that count for a tenant with a share.",
    ("tenant",),
)
TENANT_SHARE_BLOCKS = Metric(
    Kind.GAUGE,
    "tenant_share_blocks",
    "FlexKV blocks of host memory that the tenant has a right to.",
    ("tenant",),
)
TENANT_METRICS = (TENANT_BLOCKS, TENANT_SHARE_BLOCKS)
"""The metrics, whose label is the name of a tenant that has a share."""

BEGINNINGS = tuple(sample(metric.name, "") for metric in TENANT_METRICS)
"""With one of these the samples of `tenant_samples` begin, which are gauges."""


def tenant_samples(tenants: Iterable[tuple[str, float, float]]) -> Samples:
    """The values of tenants, each given by its name, its blocks and the blocks of its share."""
    found: Samples = {}
    for name, *values in tenants:
        for metric, value in zip(TENANT_METRICS, values, strict=True):
            found[sample(metric.name, name)] = value
    return found


def tenants_in(samples: Iterable[str]) -> list[str]:
    """The names of the tenants of whom there are samples."""
    begin = BEGINNINGS[0]
    return sorted(each.removeprefix(begin) for each in samples if each.startswith(begin))
