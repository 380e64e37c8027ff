# SPDX-License-Identifier: Apache-2.0
"""The first name that SGLang's own code behind `--enable-flexkv` imports. That code runs only if
SGLang has not loaded the plugin of flexkv-sglang. SGLang takes an ImportError as "FlexKV is not
installed"; this module says what is missing.

Raises:
    ConfigError: always.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from flexkv.types.errors import ConfigError

_PLUGINS = "SGLANG_PLUGINS"

if find_spec("flexkv_sglang") is None:
    raise ConfigError(
        "SGLang was started with --enable-flexkv, but the package flexkv-sglang is not installed; "
        "allowed: with it (pip install flexkv-sglang)"
    )
raise ConfigError(
    f"SGLang was started with --enable-flexkv, but has not loaded the plugin 'flexkv': "
    f"{_PLUGINS} is {os.environ.get(_PLUGINS)!r}; allowed: unset, or a list with 'flexkv'. If it "
    f"is unset, SGLang's log says at its start why it failed to load the plugin"
)
