# SPDX-License-Identifier: Apache-2.0
"""Which blocks in host memory are written to the tiers below it, and when.

Compared on a trace of a chat service by `bench/admission.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Admission:
    """When a block is offered to the lower tiers: once it is complete in host memory, each time a
    request uses it there, or shortly before its eviction. A tier does not write a block that it
    has."""

    on_store: bool
    on_hit: bool
    on_evict: bool


ADMISSIONS: dict[str, Admission] = {
    # A block that the lower tier has evicted is worth a second write once it is hit.
    "write_through": Admission(on_store=True, on_hit=True, on_evict=False),
    "second_hit": Admission(on_store=False, on_hit=True, on_evict=False),
    "on_evict": Admission(on_store=False, on_hit=False, on_evict=True),
}
