# SPDX-License-Identifier: Apache-2.0
"""Reads FlexKV's settings from `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

from collections.abc import Mapping

from flexkv.settings import SETTINGS, CacheConfig, load_config
from flexkv.types.errors import ConfigError

_SOURCE = "--hicache-storage-backend-extra-config"
_PAGES = "interface_v1"
_OF_SGLANG = {"backend_name", "module_path", "class_name", _PAGES, "allocator"}

_ADMISSION = "ssd_admission"
IGNORED = {
    name: "FlexKV keeps HiCache's pages on disk only, and SGLang decides the rest"
    for name in SETTINGS
    if name not in {"enable", "log_level"} and not name.startswith("ssd_")
} | {_ADMISSION: "HiCache decides which pages are written (--hicache-write-policy)"}
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
    config = load_config(values, _SOURCE, environ)
    if config.service is not None:
        raise ConfigError(
            f"service is {config.service!r}, and HiCache cannot use it so far; allowed: no service"
        )
    return config
