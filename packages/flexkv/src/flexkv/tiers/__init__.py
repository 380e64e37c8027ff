# SPDX-License-Identifier: Apache-2.0
"""Where blocks live below host memory. `base` is what every tier implements."""

from __future__ import annotations

from flexkv.tiers.base import BlockResult, LowerTier

__all__ = ["BlockResult", "LowerTier"]
