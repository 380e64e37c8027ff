# SPDX-License-Identifier: Apache-2.0
"""Which blocks conversations have, in bounded memory."""

from __future__ import annotations

import pytest

from flexkv.engine.scheduler import reports as module
from flexkv.engine.scheduler.reports import Sessions, own_keys


def names(text: str) -> list[bytes]:
    return [each.encode() for each in text]


def test_a_conversation_has_the_blocks_of_its_latest_request() -> None:
    sessions = Sessions()
    sessions.note("a", names("xyz"))
    sessions.note("a", names("xyzab"))
    assert sessions.keys_of("a") == names("xyzab")
    assert list(sessions.known()) == ["a"]


def test_blocks_that_another_conversation_has_are_not_its_own() -> None:
    sessions = Sessions()
    sessions.note("a", names("xyab"))
    sessions.note("b", names("xycd"))
    assert own_keys("a", sessions.known()) == names("ab")
    sessions.forget("b")
    assert own_keys("a", sessions.known()) == names("xyab")
    assert own_keys("none", sessions.known()) == []


def test_what_is_kept_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_KEYS", 10)
    sessions = Sessions()
    for number in range(6):
        sessions.note(f"s{number % 5}", names("abc"))
    assert list(sessions.known()) == ["s3", "s4", "s0"]
    sessions.note("s9", names("abcdefghijkl"))
    assert sessions.known() == {}
    sessions.note("s9", names("abc"))
    assert list(sessions.known()) == ["s9"]
