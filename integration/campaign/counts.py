# SPDX-License-Identifier: Apache-2.0
"""What a server counts, from `/metrics`."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


class Counts:
    """One scrape, parsed as Prometheus does it."""

    def __init__(self, text: str) -> None:
        self._samples = [
            (each.name, each.labels, float(each.value))
            for family in text_string_to_metric_families(text)
            for each in family.samples
            if each.name.startswith("vllm:")
        ]

    def value(self, name: str, **labels: str) -> int:
        """Of the one sample of `vllm:<name>` with these labels.

        Raises:
            ValueError: there is none, or more than one.
        """
        (found,) = [
            value
            for each, has, value in self._samples
            if each == f"vllm:{name}" and labels.items() <= has.items()
        ]
        return int(found)

    def total(self, name: str, **labels: str) -> int:
        """Of all samples of `vllm:<name>` with these labels."""
        return sum(
            int(value)
            for each, has, value in self._samples
            if each == f"vllm:{name}" and labels.items() <= has.items()
        )

    def flexkv(self) -> dict[str, int]:
        """All of FlexKV's, but for the times."""
        found = {}
        for name, labels, value in self._samples:
            own = {
                key: label for key, label in labels.items() if key not in ("model_name", "engine")
            }
            if name.startswith("vllm:flexkv_") and not name.endswith(("_created", "seconds_total")):
                short = name.removeprefix("vllm:flexkv_").removesuffix("_total")
                found[":".join((short, *own.values()))] = int(value)
        return found
