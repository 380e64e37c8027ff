# SPDX-License-Identifier: Apache-2.0
"""What a server counts, from `/metrics`."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

_OF_ENGINES = ("model_name", "engine")


class Counts:
    """One scrape, parsed as Prometheus does it.

    Args:
        text: as scraped.
        prefix: of the engine's metrics, such as "vllm:"; names here are without it.
    """

    def __init__(self, text: str, prefix: str) -> None:
        self._samples = [
            (each.name.removeprefix(prefix), each.labels, float(each.value))
            for family in text_string_to_metric_families(text)
            for each in family.samples
            if each.name.startswith(prefix)
        ]

    def value(self, name: str, **labels: str) -> int:
        """Of the one sample of this name with these labels.

        Raises:
            ValueError: there is none, or more than one.
        """
        (found,) = [
            value
            for each, has, value in self._samples
            if each == name and labels.items() <= has.items()
        ]
        return int(found)

    def total(self, name: str, **labels: str) -> int:
        """Of all samples of this name with these labels."""
        return sum(
            int(value)
            for each, has, value in self._samples
            if each == name and labels.items() <= has.items()
        )

    def hit_tokens(self) -> int:
        """Tokens that FlexKV found in any tier."""
        return self.total("flexkv_hit_tokens_total")

    def flexkv(self) -> dict[str, int]:
        """All of FlexKV's, but for the times."""
        found = {}
        for name, labels, value in self._samples:
            own = {key: label for key, label in labels.items() if key not in _OF_ENGINES}
            if name.startswith("flexkv_") and not name.endswith(("_created", "seconds_total")):
                short = name.removeprefix("flexkv_").removesuffix("_total")
                found[":".join((short, *own.values()))] = int(value)
        return found
