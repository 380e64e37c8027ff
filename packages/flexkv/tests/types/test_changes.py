# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from flexkv.types.changes import take_newest


def test_the_newest_changes_are_taken_first_and_the_rest_stays() -> None:
    changed: dict[bytes, None] = dict.fromkeys([b"a", b"b", b"c"])
    assert take_newest(changed, 2) == [b"c", b"b"]
    assert take_newest(changed, 2) == [b"a"]
    assert take_newest(changed, 2) == []


def test_what_is_not_watched_has_no_changes() -> None:
    assert take_newest(None, 2) == []
