# SPDX-License-Identifier: Apache-2.0
"""Checks the settings in vLLM's first process, before it reads weights.

vLLM creates connectors in its workers, after it has loaded the weights: minutes later for a large
model. But while it builds its configuration, in the process that the user started, it looks up the
connector's class. FlexKV then reads the settings for the first time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flexkv_vllm.compat.versions import CONNECTOR_NAME

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
        # vLLM itself stops at the first child without support for several groups.
        for child in extra.get("connectors", ()):
            _check(child.get("kv_connector"), child.get("kv_connector_extra_config", {}))
        return
    # Imported here, because all of vLLM's processes load this module.
    if connector == CONNECTOR_NAME:
        from flexkv_vllm.connector import FlexKVConnectorV1
        from flexkv_vllm.settings import check_engine, load_extra

        check_engine(load_extra(extra), FlexKVConnectorV1)
    elif connector == _OFFLOADING_CONNECTOR and extra.get("spec_name") == _OFFLOADING_SPEC:
        from flexkv_vllm.offloading import offload_settings
        from flexkv_vllm.offloading.manager import FlexKVOffloadingManager

        settings = offload_settings.load_settings(extra)
        offload_settings.check_engine(settings, FlexKVOffloadingManager)
