# SPDX-License-Identifier: Apache-2.0
"""Checks the settings in vLLM's first process, before it reads weights.

vLLM creates connectors in its workers, after it has loaded the weights: minutes later for a large
model. But while it builds its configuration, in the process that the user started, it looks up the
connector's class. FlexKV then reads the settings for the first time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flexkv import load_config
from flexkv_vllm.compat.core import CONNECTOR_NAME, check_version

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

_MULTI_CONNECTOR = "MultiConnector"
_OFFLOADING_CONNECTOR = "OffloadingConnector"
_OFFLOADING_SPEC = "FlexKVOffloadingSpec"


def check_settings(transfer: KVTransferConfig) -> None:
    """Check the settings of a connector that vLLM will create, if it is or contains FlexKV.

    Raises:
        FlexKVError: a setting or vLLM's version is not allowed.
    """
    _check(transfer.kv_connector, transfer.kv_connector_extra_config)


def _check(connector: str | None, extra: Mapping[str, Any]) -> None:
    if connector == _MULTI_CONNECTOR:
        # vLLM itself looks only as far as the first child without support for several groups.
        for child in extra.get("connectors", ()):
            _check(child.get("kv_connector"), child.get("kv_connector_extra_config", {}))
        return
    if connector == CONNECTOR_NAME:
        config = load_config(extra)
    elif connector == _OFFLOADING_CONNECTOR and extra.get("spec_name") == _OFFLOADING_SPEC:
        from flexkv_vllm.offloading.settings import load_settings

        config = load_settings(extra)
    else:
        return
    if config.enable:
        check_version(config.allow_untested_engine)
