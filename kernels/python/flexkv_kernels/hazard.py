# SPDX-License-Identifier: Apache-2.0
"""FlexKV's own eviction policy, `hazard`: `hazard.pyi` describes it."""

from __future__ import annotations

from flexkv_kernels._library import LIBRARY

HazardPolicy = LIBRARY.brief.fkv_hazard_policy_type()
