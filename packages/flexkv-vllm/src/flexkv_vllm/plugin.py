# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point: vLLM calls `register` in each of its processes.

vLLM creates connectors in its workers, after it has loaded the weights: minutes later for a large
model. But while it builds its configuration, in the process that the user started, it looks up the
connector's class. FlexKV then reads the settings for the first time. Settings that cannot have an
effect are logged there, once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flexkv.preflight.checks import check_start
from flexkv.settings.without_effect import lmcaches_variables, own_variables
from flexkv.system.uncaught import print_without_traceback
from flexkv.types.errors import FlexKVError
from flexkv_vllm.compat.patches import (
    call_at_configuration,
    call_when_choosing,
    register_connector,
)
from flexkv_vllm.compat.versions import CONNECTOR_NAME

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

logger = logging.getLogger(__name__)

_MULTI_CONNECTOR = "MultiConnector"
_OFFLOADING_CONNECTOR = "OffloadingConnector"
_OFFLOADING_SPEC = "FlexKVOffloadingSpec"

_Connector = tuple[str | None, Mapping[str, Any]]
"""Name and extra configuration of a connector."""


def register() -> None:
    """Make vLLM use FlexKV's connector for the name `FlexKVConnectorV1`.

    vLLM has a connector of this name, which forwards to FlexKV but passes on neither preemptions
    nor resets; FlexKV's connector replaces it. An error in the settings then stops vLLM before it
    reads weights. Settings without effect are logged.
    """
    register_connector(CONNECTOR_NAME, "flexkv_vllm.connector")
    call_when_choosing(check_settings)
    call_at_configuration(report_without_effect)


def check_settings(transfer: KVTransferConfig) -> None:
    """Check the settings of a connector that vLLM will create, if it is or contains FlexKV. Raises
    FlexKVError if a setting or vLLM's version is not allowed. If nobody catches it, the process
    prints it as one line."""
    print_without_traceback(FlexKVError)
    for connector, extra in _ours(transfer):
        # Imported here, because all of vLLM's processes load this module.
        from flexkv_vllm.settings import check_engine, load_extra

        if connector == CONNECTOR_NAME:
            from flexkv_vllm.connector import FlexKVConnectorV1

            settings = load_extra(extra)
            check_engine(settings, FlexKVConnectorV1)
        else:
            from flexkv_vllm.offloading.manager import FlexKVOffloadingManager
            from flexkv_vllm.offloading.spec import load_settings

            settings = load_settings(extra)
            check_engine(settings, FlexKVOffloadingManager)
        check_start(settings)


def report_without_effect(given: KVTransferConfig | None, used: KVTransferConfig | None) -> None:
    """Log settings of FlexKV that have no effect, because vLLM uses another connector or none, and
    settings of LMCache beside FlexKV.

    Args:
        given: configuration of the connector that the user gave.
        used: the configuration that vLLM uses.
    """
    if _uses_flexkv(used):
        theirs = lmcaches_variables()
        if theirs and not any("LMCache" in str(name) for name, _ in _connectors(used)):
            logger.warning("%s", theirs)
    elif _uses_flexkv(given):
        logger.error(
            "vLLM replaces FlexKV by %s, because --kv-offloading-size is set: FlexKV keeps no "
            "blocks; remove --kv-offloading-size, and set cpu_cache_gb instead",
            used.kv_connector if used is not None else None,
        )
    else:
        ours = own_variables()
        if ours:
            logger.warning(
                "%s: set, but without effect, because vLLM does not use FlexKV; to use it: "
                '--kv-transfer-config \'{"kv_connector": "%s", "kv_role": "kv_both"}\'',
                ours,
                CONNECTOR_NAME,
            )


def _uses_flexkv(transfer: KVTransferConfig | None) -> bool:
    return any(_ours(transfer))


def _ours(transfer: KVTransferConfig | None) -> Iterator[_Connector]:
    """Those of `_connectors` that are FlexKV's."""
    for connector, extra in _connectors(transfer):
        spec = extra.get("spec_name") if connector == _OFFLOADING_CONNECTOR else None
        if connector == CONNECTOR_NAME or spec == _OFFLOADING_SPEC:
            yield connector, extra


def _connectors(transfer: KVTransferConfig | None) -> Iterator[_Connector]:
    """The name and the extra configuration of the connector, or of those in a `MultiConnector`."""
    if transfer is not None:
        yield from _children(transfer.kv_connector, transfer.kv_connector_extra_config)


def _children(connector: str | None, extra: Mapping[str, Any]) -> Iterator[_Connector]:
    if connector != _MULTI_CONNECTOR:
        yield connector, extra
        return
    # vLLM itself stops at the first child without support for several groups.
    for child in extra.get("connectors", ()):
        yield from _children(child.get("kv_connector"), child.get("kv_connector_extra_config", {}))
