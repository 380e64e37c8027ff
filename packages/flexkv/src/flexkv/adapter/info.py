# SPDX-License-Identifier: Apache-2.0
"""FlexKV's version and settings as the labels of a metric."""

from __future__ import annotations

from flexkv.config import CacheConfig, settings
from flexkv.version import __version__

NAME = "info"
TEXT = "Always 1; the labels are FlexKV's version and the settings in force, paths left out."

_SETTINGS = tuple(each.name for each in settings() if "path" not in each.metadata["unit"])
"""Numbers, booleans and names of which there are few. Paths may be long, and whoever reads metrics
need not know them."""

LABELS = ("version", *_SETTINGS)


def info_labels(config: CacheConfig) -> tuple[str, ...]:
    """Values of `LABELS`. A setting that was not made, and has no value by itself, is empty: the
    gauges say what FlexKV chose."""
    return (__version__, *(_text(getattr(config, name)) for name in _SETTINGS))


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
