# SPDX-License-Identifier: Apache-2.0
"""FlexKV's own policy `hazard`. The kernels implement it, because Python would be too slow."""

from __future__ import annotations

from flexkv.eviction.policy import EvictionPolicy
from flexkv.system.native import kernels
from flexkv.types.errors import ConfigError

MOST_BLOCKS = (1 << 24) - 1
"""The most blocks of a tier; the kernels number them in 24 bits."""


def hazard_policy(slots: int) -> EvictionPolicy:
    """Make the policy `hazard` for a tier of `slots` blocks.

    Raises:
        ConfigError: the kernels are not installed, or the tier has too many blocks.
    """
    try:
        policy: EvictionPolicy = kernels("hazard").HazardPolicy(slots)
    except ValueError as error:
        raise ConfigError(f"host memory evicts by hazard and its {error}; or lru") from None
    return policy
