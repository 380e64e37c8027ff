# SPDX-License-Identifier: Apache-2.0
"""FlexKV's version and settings as the labels of a metric."""

from __future__ import annotations

from flexkv.settings.config import CacheConfig, settings
from flexkv.version import __version__

NAME = "info"
TEXT = "Always 1; the labels are FlexKV's version and the settings in force, paths left out."

_SETTINGS = tuple(each.name for each in settings() if "path" not in each.metadata["unit"])
"""Settings that are numbers, booleans or names. Paths may be long, and readers of metrics do not
need them."""

LABELS = ("version", *_SETTINGS)


def info_labels(config: CacheConfig) -> tuple[str, ...]:
    """Values of `LABELS`. A setting without a value is empty; the gauges show FlexKV's choice."""
    return (__version__, *(_text(getattr(config, name)) for name in _SETTINGS))


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
