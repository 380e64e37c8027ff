# SPDX-License-Identifier: Apache-2.0
"""Reads FlexKV's settings from SGLang's command line: those of the linker, and of HiCache."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from flexkv import CacheConfig, load_config
from flexkv.settings import CONFIG_PATH_VARIABLE
from flexkv.settings.without_effect import engines_settings, report_without_effect
from flexkv.types.errors import ConfigError

_SOURCE = "--unified-cache-external-linker-config"
_STORAGE_SOURCE = "--hicache-storage-backend-extra-config"
_FILE = "config_file"
_PAGES = "interface_v1"
_OF_SGLANG = {"backend_name", "module_path", "class_name", _PAGES, "allocator"}

LINKER_MODULE = "flexkv_sglang.linker"
"""The module that SGLang imports for FlexKV's linker."""

_IGNORED = {
    "block_tokens": "a block is one page of SGLang: see --page-size",
    "load_mode": "SGLang's linker loads layer by layer",
}
"""The settings that have no effect under SGLang's linker, with the reasons."""

IGNORED_UNDER_HICACHE = engines_settings(
    "HiCache decides what is stored and loaded", but=["log_level", "tenant"]
)


def read_settings(extra: dict[str, Any]) -> CacheConfig:
    """Combine the settings of the command line, the environment and the settings file. `extra`:
    `linker_extra_config` of SGLang's command line: settings by name. Its `config_file` is the path
    from `--flexkv-config-file`, which replaces FLEXKV_CONFIG_PATH. Raises ConfigError if a setting
    is not allowed."""
    values = dict(extra)
    path = values.pop(_FILE, None)
    environ = dict(os.environ)
    if path is not None:
        if not isinstance(path, str) or not path:
            raise ConfigError(f"{_FILE} is {path!r} ({_SOURCE}); allowed: the path of a file")
        environ[CONFIG_PATH_VARIABLE] = path
    return load_config(values, _SOURCE, environ)


def read_storage_settings(extra: Mapping[str, object]) -> CacheConfig:
    """As `read_settings`, under HiCache. `extra`: `--hicache-storage-backend-extra-config`:
    SGLang's own keys, and FlexKV's settings. Raises ConfigError if a setting is not allowed, or
    `interface_v1` is not set, without which SGLang does not pass where its pages are."""
    if not extra.get(_PAGES):
        given = f"is {extra[_PAGES]!r}" if _PAGES in extra else "is missing"
        raise ConfigError(
            f"{_PAGES} {given} in {_STORAGE_SOURCE}; allowed: 1, with which HiCache passes where "
            f"its pages are"
        )
    values = {key: value for key, value in extra.items() if key not in _OF_SGLANG}
    return load_config(values, _STORAGE_SOURCE)


def engines_of(settings: Any) -> int:
    """How many engines a server has: replicas of the model (data parallelism), or groups of ranks
    with a scheduler of their own (DP attention), of which SGLang allows one kind at a time. Of
    SGLang's resolved settings, `--dp-size` stands for one kind or the other."""
    return int(settings.dp_size or 1) * int(getattr(settings, "attn_dp_size", 1) or 1)


def share_of_engine(config: CacheConfig, engines: int) -> CacheConfig:
    """The settings of one engine of a server with data parallelism: each size that is given is that
    of the server, and each engine has an equal part of it."""
    return dataclasses.replace(
        config,
        cpu_cache_gb=_part(config.cpu_cache_gb, engines),
        ssd_cache_gb=_part(config.ssd_cache_gb, engines),
        ssd_write_gb_per_day=_part(config.ssd_write_gb_per_day, engines),
        mooncake_segment_gb=config.mooncake_segment_gb / engines,
    )


def _part(size: float | None, engines: int) -> float | None:
    return None if size is None else size / engines


def report_ignored(config: CacheConfig) -> None:
    """Log the settings that are set and have no effect under SGLang's linker."""
    report_without_effect(config, _IGNORED)


def linker_config(path: str | None) -> dict[str, Any]:
    """The value of `--unified-cache-external-linker-config` that `--enable-flexkv` stands for."""
    return {
        "linker": "FlexKVLinker",
        "linker_module_path": LINKER_MODULE,
        "linker_extra_config": {} if path is None else {_FILE: path},
    }
