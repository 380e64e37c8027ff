# SPDX-License-Identifier: Apache-2.0
"""The name that vLLM's own FlexKVConnectorV1 imports."""

from __future__ import annotations

from flexkv_vllm.intree_connector import FlexKVConnectorV1Impl

__all__ = ["FlexKVConnectorV1Impl"]
