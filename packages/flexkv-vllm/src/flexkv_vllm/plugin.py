# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point: vLLM calls `register` in each of its processes."""

from __future__ import annotations

from flexkv_vllm.compat.patches import (
    call_at_configuration,
    call_when_choosing,
    register_connector,
)
from flexkv_vllm.compat.versions import CONNECTOR_NAME
from flexkv_vllm.preflight import check_settings, report_without_effect


def register() -> None:
    """Make vLLM use FlexKV's connector for the name `FlexKVConnectorV1`.

    vLLM has a connector of this name, which forwards to FlexKV but passes on neither preemptions
    nor resets; FlexKV's connector replaces it. An error in the settings then stops vLLM before it
    reads weights. Settings without effect are logged.
    """
    register_connector(CONNECTOR_NAME, "flexkv_vllm.connector")
    call_when_choosing(check_settings)
    call_at_configuration(report_without_effect)
