# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from flexkv.types.changes import Changes, Medium, changes_of, note, take_oldest


def test_the_oldest_changes_are_taken_first() -> None:
    changed = dict.fromkeys((b"a", b"b", b"c"), True)
    assert list(take_oldest(changed, 2)) == [b"a", b"b"]
    assert take_oldest(changed, 2) == {b"c": True}
    assert take_oldest(changed, 2) == {}


def test_a_block_that_came_and_left_has_not_changed() -> None:
    changed: dict[bytes, bool] = {}
    for loadable in (True, False, True):
        note(changed, b"a", loadable)
    note(changed, b"b", False)
    note(changed, b"b", True)
    assert changed == {b"a": True}


def test_changes_of_a_medium_are_two_lists_in_order() -> None:
    changed = {b"a": True, b"b": False, b"c": True, b"d": False}
    (changes,) = changes_of(Medium.DISK, changed)
    assert changes == Changes(Medium.DISK, removed=[b"b", b"d"], added=[b"a", b"c"])
    assert changes_of(Medium.DISK, {}) == []
