# SPDX-License-Identifier: Apache-2.0
"""FlexKV's own policy, which lies in the kernels: in Python it would cost more than it may.

The core runs without the kernels, and lies below them. So it finds the policy by name.
"""

from __future__ import annotations

from importlib import import_module

from flexkv.errors import ConfigError
from flexkv.eviction.base import EvictionPolicy

_KERNELS = "flexkv_kernels.hazard"


def has_hazard_policy() -> bool:
    """Whether the kernels are installed."""
    try:
        import_module(_KERNELS)
    except ImportError:
        return False
    return True


def hazard_policy(slots: int) -> EvictionPolicy:
    """The policy `hazard` for a tier of so many blocks.

    Raises:
        ConfigError: the kernels are not installed, or the tier has too many blocks.
    """
    try:
        kernels = import_module(_KERNELS)
    except ImportError as error:
        raise ConfigError(
            f"eviction_policy is hazard and the kernels are not installed ({error}); allowed: pip "
            f"install flexkv-kernels, or another policy"
        ) from None
    try:
        policy: EvictionPolicy = kernels.HazardPolicy(slots)
    except ValueError as error:
        raise ConfigError(f"eviction_policy is hazard and its {error}; or another policy") from None
    return policy
