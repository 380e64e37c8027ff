# SPDX-License-Identifier: Apache-2.0
"""Policies of a tier that tenants share: one for each tenant with a share, and one for all others.

The index picks the tenant that loses a block, by `kernels/src/index/tenants.cpp`: the one that has
most for its share. So a tenant below its share loses no block to one above it, and what a tenant
does not use is lent to the others. The tenant's own policy picks the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flexkv.eviction.policy import EvictionPolicy, GuardState, LRUPolicy
from flexkv.types.tenants import NO_TENANT, tenant_number


class TenantPolicies:
    """What an index takes in the place of one policy.

    Args:
        shares: parts of the tier, above 0 and 1 together at most, by the tenants' names. Tenants
            without a name here have the rest together.
        slots: blocks of the tier.
        make: makes a policy for so many blocks.

    Attributes:
        shares: as above.
        parts: for each tenant its number, the slots of its share, and its policy; None evicts the
            least recently used. The first is that of all others.
    """

    def __init__(
        self,
        shares: Mapping[str, float],
        slots: int,
        make: Callable[[int], EvictionPolicy | LRUPolicy],
    ) -> None:
        def policy() -> EvictionPolicy | None:
            made = make(slots)
            return None if isinstance(made, LRUPolicy) else made

        self.shares = shares
        rest = max(0.0, 1.0 - sum(shares.values()))
        parts = {NO_TENANT: rest} | {tenant_number(name): part for name, part in shares.items()}
        self.parts: Sequence[tuple[int, float, EvictionPolicy | None]] = tuple(
            (tenant, part * slots, policy()) for tenant, part in parts.items()
        )

    def guard_state(self) -> GuardState:
        """The sums of all guards; see `EvictionPolicy.guard_state`."""
        known = [each.guard_state() for _, _, each in self.parts if each is not None]
        return GuardState(
            all(each.trusts_hazard for each in known),
            sum(each.credit for each in known),
            sum(each.immune_blocks for each in known),
            sum(each.hits for each in known),
            sum(each.lru_hits for each in known),
            sum(each.switches for each in known),
        )
