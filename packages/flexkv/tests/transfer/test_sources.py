# SPDX-License-Identifier: Apache-2.0
"""What a cache knows of a tier that is queried."""

from __future__ import annotations

import pytest
from memory_tier import MemoryTier, QueriedMemoryTier

from flexkv.transfer.sources import Source


@pytest.mark.parametrize("before", [(), (b"a",)])
def test_a_key_of_a_prefix_and_of_scattered_blocks_is_asked_about_once(
    before: tuple[bytes, ...],
) -> None:
    memory = MemoryTier()
    tier = QueriedMemoryTier(memory, 1.0)
    source = Source(tier, 0, 1.0)
    source.query(before)
    source.query([b"a", b"b"], [b"b", b"c", b"c"])
    assert sorted(key for keys in tier.questions.values() for key in keys) == [b"a", b"b", b"c"]
    for ticket in [*tier.questions]:
        tier.answer(ticket)
    assert source.poll()
    assert list(source.contains([b"a", b"b", b"c"])) == [False] * 3
