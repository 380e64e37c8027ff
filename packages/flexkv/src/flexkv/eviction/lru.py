# SPDX-License-Identifier: Apache-2.0
"""Least recently used first."""

from __future__ import annotations


class LRUPolicy:
    """Evicts the block whose last use is longest ago.

    The index knows the order of uses, so it asks nobody: this is no `EvictionPolicy`, but stands
    where one may stand.
    """
