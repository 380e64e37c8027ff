# SPDX-License-Identifier: Apache-2.0
"""FlexKV's settings as SGLang's command line gives them."""

from __future__ import annotations

import os
from typing import Any

from flexkv import CacheConfig, load_config
from flexkv.config_sources import CONFIG_PATH_VARIABLE
from flexkv.errors import ConfigError

_SOURCE = "--unified-cache-external-linker-config"
_FILE = "config_file"


def read_settings(extra: dict[str, Any]) -> CacheConfig:
    """The settings in force.

    Args:
        extra: `linker_extra_config` of SGLang's command line: settings, and `config_file`, which is
            what `--flexkv-config-file` names and stands for FLEXKV_CONFIG_PATH.

    Raises:
        ConfigError: a setting is not allowed.
    """
    values = dict(extra)
    path = values.pop(_FILE, None)
    environ = dict(os.environ)
    if path is not None:
        if not isinstance(path, str) or not path:
            raise ConfigError(f"{_FILE} is {path!r} ({_SOURCE}); allowed: the path of a file")
        environ[CONFIG_PATH_VARIABLE] = path
    return load_config(values, _SOURCE, environ)


def linker_config(path: str | None) -> dict[str, Any]:
    """What `--enable-flexkv` stands for in `--unified-cache-external-linker-config`."""
    return {
        "linker": "FlexKVLinker",
        "linker_module_path": "flexkv_sglang.linker",
        "linker_extra_config": {} if path is None else {_FILE: path},
    }
