# SPDX-License-Identifier: Apache-2.0
"""FlexKV's version and settings as the labels of a metric."""

from __future__ import annotations

from flexkv.settings import SETTINGS, CacheConfig
from flexkv.version import __version__

NAME = "info"
TEXT = "Always 1; the labels are FlexKV's version and the settings in force, paths left out."

_SETTINGS = tuple(each for each in SETTINGS.values() if not each.kind.shows_place)
"""Settings that are numbers, booleans or names. Paths may be long, and readers of metrics do not
need them."""

LABELS = ("version", *(each.name for each in _SETTINGS))


def info_labels(config: CacheConfig) -> tuple[str, ...]:
    """Values of `LABELS`. A setting without a value is empty; the gauges show FlexKV's choice."""
    return (__version__, *(each.written(getattr(config, each.name)) for each in _SETTINGS))
