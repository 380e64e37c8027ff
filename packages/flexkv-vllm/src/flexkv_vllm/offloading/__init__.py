# SPDX-License-Identifier: Apache-2.0
"""FlexKV's blocks under vLLM's own `OffloadingConnector`, by the interface that vLLM publishes.

`FlexKVOffloadingSpec` keeps vLLM's blocks in FlexKV's arena and below. `tier.FlexKVTier` keeps them
below vLLM's own CPU memory. Neither replaces a method of vLLM's connector.
"""

from __future__ import annotations

import vllm
from vllm.v1.kv_offload import base

from flexkv import EngineVersionError
from flexkv_vllm.compat.versions import CONNECTOR, OFFLOADING

if not hasattr(base.ReqContext, "get_offload_key_position"):
    raise EngineVersionError(
        f"vLLM {vllm.__version__} is installed, whose OffloadingConnector FlexKV cannot serve; "
        f"allowed: {OFFLOADING}, a newer version, or FlexKV's own connector ({CONNECTOR.runs})"
    )

from flexkv_vllm.offloading.spec import FlexKVOffloadingSpec

__all__ = ["FlexKVOffloadingSpec"]
