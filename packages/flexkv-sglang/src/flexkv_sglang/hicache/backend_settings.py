# SPDX-License-Identifier: Apache-2.0
"""Reads FlexKV's settings from `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

from collections.abc import Mapping

from flexkv.settings import CacheConfig, load_config
from flexkv.settings.without_effect import engines_settings
from flexkv.types.errors import ConfigError

_SOURCE = "--hicache-storage-backend-extra-config"
_PAGES = "interface_v1"
_OF_SGLANG = {"backend_name", "module_path", "class_name", _PAGES, "allocator"}

IGNORED = engines_settings("HiCache decides what is stored and loaded", but=["log_level", "tenant"])
"""The settings that have no effect under HiCache, with the reasons."""


def read_settings(extra: Mapping[str, object], environ: Mapping[str, str] | None) -> CacheConfig:
    """Combine the settings of the command line, the environment and the settings file.

    Args:
        extra: the JSON object of the command line: SGLang's own keys, and FlexKV's settings.
        environ: the environment; `os.environ` if None.

    Raises:
        ConfigError: a setting is not allowed, or `interface_v1` is not set, without which SGLang
            does not pass where its pages are.
    """
    if not extra.get(_PAGES):
        given = f"is {extra[_PAGES]!r}" if _PAGES in extra else "is missing"
        raise ConfigError(
            f"{_PAGES} {given} in {_SOURCE}; allowed: 1, with which HiCache passes where its pages "
            f"are"
        )
    values = {key: value for key, value in extra.items() if key not in _OF_SGLANG}
    return load_config(values, _SOURCE, environ)
