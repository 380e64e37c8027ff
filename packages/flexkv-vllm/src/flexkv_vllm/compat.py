# SPDX-License-Identifier: Apache-2.0
"""What differs between vLLM versions, in one place."""

from __future__ import annotations

import re

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from flexkv import EngineVersionError

CONNECTOR_NAME = "FlexKVConnectorV1"

OLDEST = (0, 27)
NEWEST = (0, 32)
"""Releases (major, minor) whose connector interface this adapter was written for."""


def check_version(allow_untested: bool, version: str = vllm.__version__) -> None:
    """Refuse a vLLM outside the supported range.

    Args:
        allow_untested: the setting `allow_untested_engine`.
        version: vLLM's own version string. A development build without a number (0.0.0 or
            "dev") is taken for untested.

    Raises:
        EngineVersionError: names the version, the range, and how to override.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    if OLDEST <= release <= NEWEST or allow_untested:
        return
    raise EngineVersionError(
        f"vLLM {version} is installed; allowed: {OLDEST[0]}.{OLDEST[1]} to "
        f"{NEWEST[0]}.{NEWEST[1]}, or any with allow_untested_engine=true "
        f"(FLEXKV_ALLOW_UNTESTED_ENGINE=1)"
    )


def register_connector(name: str, module: str) -> None:
    """Register the class `name` of `module` with vLLM, in place of one that has its name.

    vLLM refuses a second registration, and runs plugins more than once in one process, so a
    registered name is taken out of the registry first.
    """
    KVConnectorFactory._registry.pop(name, None)
    KVConnectorFactory.register_connector(name, module, name)
