# SPDX-License-Identifier: Apache-2.0
"""FlexKV's figures at an engine's `/metrics`, made by whatever the engine makes its own with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

from flexkv.adapter import info
from flexkv.adapter.metrics import GAUGES, METRICS, Kind, Samples, sample
from flexkv.config import CacheConfig

Make: TypeAlias = Callable[[str, str, Sequence[str]], Any]
"""Makes a metric of a name, a text and the names of its labels, as prometheus_client does."""


class Exposition:
    """FlexKV's metrics of the engines that a process serves. All values exist from the start, so
    that a rate over the first one is right.

    Args:
        prefix: of all names, the engine's own.
        counter: makes what only grows.
        gauge: makes what has a last value.
        label_names: of the engine's own labels.
        engines: values of these labels, by engine.
        config: of the engines.
    """

    def __init__(
        self,
        prefix: str,
        counter: Make,
        gauge: Make,
        *,
        label_names: Sequence[str],
        engines: Mapping[Any, Sequence[object]],
        config: CacheConfig,
    ) -> None:
        self._values: dict[tuple[Hashable, str], Any] = {}
        own = list(label_names)
        for metric in METRICS:
            make = counter if metric.kind is Kind.COUNTER else gauge
            made = make(prefix + metric.name, metric.text, [*own, *metric.label_names])
            for engine, values in engines.items():
                for labels in metric.combinations:
                    name = sample(metric.name, *labels)
                    self._values[engine, name] = made.labels(*values, *labels)
        about = gauge(prefix + info.NAME, info.TEXT, [*own, *info.LABELS])
        for values in engines.values():
            about.labels(*values, *info.info_labels(config)).set(1)

    def observe(self, samples: Samples, engine: Hashable) -> None:
        """Take in what an engine has counted since the last call."""
        for name, value in samples.items():
            metric = self._values.get((engine, name))
            if metric is None:
                continue
            if name in GAUGES:
                metric.set(value)
            else:
                metric.inc(value)
