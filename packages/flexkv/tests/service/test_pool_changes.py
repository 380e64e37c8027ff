# SPDX-License-Identifier: Apache-2.0
"""What an engine is told of its pool's blocks is what differs from what it knew."""

from __future__ import annotations

from typing import Any

import pytest

from flexkv.service import messages as wire
from flexkv.service.pool_changes import PoolChanges
from flexkv.types.changes import Changes, Medium

HOST, DISK = Medium.HOST, Medium.DISK


@pytest.fixture
def changes() -> PoolChanges:
    """Nothing here reads the index or sends a message."""
    unused: Any = None
    return PoolChanges(unused, unused)


def test_a_block_that_came_and_left_between_two_drains_is_no_change(changes: PoolChanges) -> None:
    changes.hear(wire.Changed(HOST, [], [b"a", b"b"], [b"", b"text"]))
    changes.hear(wire.Changed(HOST, [b"a"], [], []))
    assert changes.drain() == [Changes(HOST, [], [b"b"], {b"b": b"text"})]
    changes.hear(wire.Changed(HOST, [b"b"], [], []))
    changes.hear(wire.Changed(HOST, [], [b"b"], []))
    assert changes.is_empty
    assert changes.drain() == []


def test_what_is_told_again_is_no_change(changes: PoolChanges) -> None:
    for _ in range(2):
        changes.hear(wire.Changed(DISK, [], [b"a"], [b"text"]))
    assert changes.drain() == [Changes(DISK, [], [b"a"], {b"a": b"text"})]
    changes.hear(wire.Changed(DISK, [], [b"a"], [b"text"]))
    assert changes.is_empty
    assert changes.drain() == []
