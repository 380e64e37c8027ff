# SPDX-License-Identifier: Apache-2.0
"""FlexKV's cache under vLLM's own `OffloadingConnector`: an offloading spec.

vLLM decides what is loaded and stored, also for models with several KV cache groups. FlexKV keeps
the blocks in the same arena and on the same disks as its own connector, and copies them by the same
movers.
"""

from __future__ import annotations

import importlib.util

import vllm

from flexkv import EngineVersionError
from flexkv_vllm.compat.versions import CONNECTOR, OFFLOADING

if importlib.util.find_spec("vllm.v1.kv_offload.config") is None:
    raise EngineVersionError(
        f"vLLM {vllm.__version__} is installed, whose OffloadingConnector FlexKV cannot serve; "
        f"allowed: {OFFLOADING}, a newer version, or FlexKV's own connector ({CONNECTOR.runs})"
    )

from flexkv_vllm.offloading.spec import FlexKVOffloadingSpec

__all__ = ["FlexKVOffloadingSpec"]
