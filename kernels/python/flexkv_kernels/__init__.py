# SPDX-License-Identifier: Apache-2.0
"""Native copies between the pages of an engine's KV cache and an arena in host memory."""

from __future__ import annotations

from flexkv.transfer import Direction, Status
from flexkv_kernels.mover import CpuMover, CpuOptions, available_kernels

__all__ = ["CpuMover", "CpuOptions", "Direction", "Status", "available_kernels"]
