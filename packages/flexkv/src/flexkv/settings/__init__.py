# SPDX-License-Identifier: Apache-2.0
"""The settings: one field of `config.CacheConfig` each, from which all else about it follows."""

from __future__ import annotations

from flexkv.settings.config import (
    GIB,
    MOST_PIN_SECONDS,
    SETTINGS,
    CacheConfig,
    address_setting,
)
from flexkv.settings.config_sources import configure_logging, load_config
from flexkv.settings.settings_file import CONFIG_PATH_VARIABLE

__all__ = [
    "CONFIG_PATH_VARIABLE",
    "GIB",
    "MOST_PIN_SECONDS",
    "SETTINGS",
    "CacheConfig",
    "address_setting",
    "configure_logging",
    "load_config",
]
