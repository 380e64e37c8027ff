# SPDX-License-Identifier: Apache-2.0
"""Series of FlexKV's metrics as PromQL names them, checked against the metrics' definitions."""

from __future__ import annotations

from dataclasses import dataclass

from flexkv.figures.definitions import METRICS, Kind
from flexkv.figures.exposition import INFO_NAME

_METRICS = {metric.name: metric for metric in METRICS}
ENDINGS = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_bucket"}
"""The ends of the names of the series that panels and alerts read."""


@dataclass(frozen=True, slots=True)
class Names:
    """PromQL for the metrics of one kind of engine.

    Attributes:
        prefix: before the name of each metric.
        scope: matchers of labels that are not FlexKV's, for every series; may be empty.
        window: over which rates are taken by default.
        span: the whole time range that is looked at.
    """

    prefix: str
    scope: str
    window: str
    span: str

    def series(self, name: str, **labels: str) -> str:
        """A selector of the metric `name`: of a histogram, its buckets.

        Args:
            name: of the metric, as its definition has it.
            labels: matchers by label: a value, or several separated by "|".

        Raises:
            ValueError: there is no such metric, label or value.
        """
        if name == INFO_NAME:
            return f"{self.prefix}{name}{self._selector({})}"
        metric = _METRICS.get(name)
        if metric is None:
            raise ValueError(f"no metric is called {name!r}; allowed: {', '.join(_METRICS)}")
        for label, value in labels.items():
            names = metric.label_names
            places = [names.index(label)] if label in names else []
            allowed = {values[place] for values in metric.combinations for place in places}
            if not allowed.issuperset(value.split("|")):
                known = ", ".join(sorted(allowed))
                raise ValueError(f"{name} has no {label}={value!r}; allowed: {known}")
        return f"{self.prefix}{name}{ENDINGS[metric.kind]}{self._selector(labels)}"

    def rate(self, name: str, window: str = "", **labels: str) -> str:
        """Growth of a counter or of the buckets of a histogram in a second."""
        return f"rate({self.series(name, **labels)}[{window or self.window}])"

    def increase(self, name: str, window: str = "", **labels: str) -> str:
        """Growth of a counter in the window."""
        return f"increase({self.series(name, **labels)}[{window or self.window}])"

    def quantile(self, share: float, name: str, *by: str, window: str = "") -> str:
        """A quantile of a histogram's values, by labels."""
        labels = ", ".join(("le", *by))
        return f"histogram_quantile({share:g}, sum by ({labels}) ({self.rate(name, window)}))"

    def _selector(self, labels: dict[str, str]) -> str:
        own = [
            f'{label}=~"{value}"' if "|" in value else f'{label}="{value}"'
            for label, value in labels.items()
        ]
        matchers = ", ".join([*own, self.scope] if self.scope else own)
        return f"{{{matchers}}}" if matchers else ""
