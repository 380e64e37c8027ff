# SPDX-License-Identifier: Apache-2.0
"""Tenants, who share a cache."""

from __future__ import annotations

import zlib

NO_TENANT = 0
"""The number of all who have no name."""

MOST_TENANTS = 64
"""Tenants that can have a share of their own."""

NAME_CHARACTERS = 128
"""The longest name of a tenant in settings."""

LARGEST_TENANT = 0xFFFFFFFE
"""The largest number of a tenant."""


def tenant_number(name: str) -> int:
    """The number that stands for a tenant in an index, the same in every process."""
    if not name:
        return NO_TENANT
    return min(max(1, zlib.crc32(name.encode("utf-8", "surrogatepass"))), LARGEST_TENANT)
