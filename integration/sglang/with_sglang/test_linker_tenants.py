# SPDX-License-Identifier: Apache-2.0
"""SGLang's own tree names the salt of what it offloads, and so the tenant for whom it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexkv.types.tenants import NO_TENANT, tenant_number
from integration.sglang.with_sglang.linked import PAGE, LinkedRank


def test_offloaded_pages_count_for_the_tenant_of_their_salt(tmp_path: Path) -> None:
    linked = LinkedRank(tmp_path, settings={"tenant_shares": {"a": 50, "b": 25}})
    try:
        first, second = range(3 * PAGE), range(5 * PAGE)
        linked.compute(first, 1, "a")
        linked.settle()
        linked.compute(first, 2)
        linked.settle()
        linked.compute(second, 3, "b")
        linked.settle()
        cache: Any = linked.rank.side._cache
        slots = {tenant: slots for tenant, slots in cache.slots_of_tenants.items() if slots}
        assert slots == {tenant_number("a"): 3, NO_TENANT: 3, tenant_number("b"): 5}
    finally:
        linked.close()
