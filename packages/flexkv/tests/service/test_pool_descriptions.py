# SPDX-License-Identifier: Apache-2.0
"""The descriptions of a pool's blocks reach engines, and take no more memory than they may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flexkv.service import messages as wire
from flexkv.service.pool_changes import ENTRY_BYTES, PoolDescriptions, joined
from flexkv.service.pool_keys import TierKeys
from flexkv.service.state import clear_pools
from flexkv.types.changes import Changes, Medium
from packages.flexkv.tests.service.served import Scheduler, Service, keys_of, until


class NoCache:
    """Has these blocks in host memory."""

    def __init__(self, *present: bytes) -> None:
        self.present = {*present}

    def missing(self, keys: list[bytes]) -> list[int]:
        return [at for at, key in enumerate(keys) if key not in self.present]

    def reported(self, keys: list[bytes]) -> list[bool]:
        return [key in self.present for key in keys]

    def listed(self) -> list[list[bytes]]:
        return [[*self.present]]

    def describe(self, described: dict[bytes, bytes]) -> None: ...


Attach = Callable[..., Scheduler]


def texts_of(messages: list[wire.Changed]) -> dict[tuple[Medium, bytes], bytes]:
    return {
        (each.medium, key): text
        for each in messages
        for key, text in zip(each.added, each.texts or [b""] * len(each.added), strict=True)
    }


def test_old_descriptions_give_way() -> None:
    keys = keys_of("a", 8)
    cache: Any = NoCache(*keys)
    below = TierKeys(64)
    kept = PoolDescriptions(cache, below, 4 * (100 + ENTRY_BYTES))
    for key in keys:
        kept.add({key: key.ljust(100)})
    kept.add({keys[-1]: keys[-1].ljust(100)})
    found = texts_of([each for some in kept.again() for each in some])
    assert found == {
        (Medium.HOST, key): key.ljust(100) if key in keys[-4:] else b"" for key in keys
    }
    below.close()


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_nowhere_is_forgotten(monkeypatch: pytest.MonkeyPatch, on_disk: bool) -> None:
    monkeypatch.setattr("flexkv.service.pool_changes._LEAVING", 2)
    keys = keys_of("a", 6)
    cache: Any = NoCache(*keys)
    below = TierKeys(64)
    kept = PoolDescriptions(cache, below, 1 << 20)
    kept.add(dict.fromkeys(keys, b"text"))
    if on_disk:
        below.note([Changes(Medium.DISK, [], keys)], are_all=True)
    cache.present.clear()
    told = list(kept.messages([Changes(Medium.HOST, keys, [])]))
    assert [each.removed for each in told] == [keys]
    cache.present.update(keys)  # to see what is left
    again = texts_of([each for some in kept.again() for each in some])
    left = {key for (medium, key), text in again.items() if text and medium is Medium.HOST}
    assert left == {*(keys if on_disk else keys[-2:])}
    below.close()


def test_an_engine_that_does_not_read_gets_few_messages() -> None:
    keys = keys_of("a", 1200)
    one = [wire.Changed(Medium.DISK, [], [key], [b"text"]) for key in keys]
    parts = [one[0]]
    for message in one[1:]:
        both = joined(parts[-1], message)
        if both is None:
            parts.append(message)
        else:
            parts[-1] = both
    assert [key for each in parts for key in each.added] == keys
    assert len(parts) == -(-1200 // wire.MOST_KEYS)
    removal = wire.Changed(Medium.DISK, [b"x"], [], [])
    assert joined(one[0], removal) is None is joined(removal, one[0])
    assert joined(one[0], wire.Changed(Medium.HOST, [], [b"x"], [b"t"])) is None


def test_messages_fit_into_packets_and_leave_out_what_does_not() -> None:
    described = {key: bytes(500) for key in keys_of("a", 300)} | {b"long": bytes(1 << 16)}
    parts = list(wire.described_parts(described))
    sent = {key: text for part in parts for key, text in part.items()}
    assert sent == described | {b"long": b""}
    for part in parts:
        message = wire.Changed(Medium.DISK, [], [*part], [*part.values()])
        (packet,) = wire.packets([message])
        assert wire.read_engine(packet) == [message]


def test_a_description_comes_with_its_block_and_to_those_that_begin_later(
    service: Service, attach: Attach
) -> None:
    one, other = attach(service), attach(service)
    keys = keys_of("a", 3)
    other.cache.watch()
    other.settle()
    one.cache.describe({key: key + b" text" for key in keys})
    one.store(keys)
    for each in (other, attach(service)):
        each.cache.watch()
        until(lambda each=each: each.cache.status.has_changes, each.cache.poll)
        (change,) = each.cache.drain_changes()
        assert (change.medium, change.added) == (Medium.HOST, keys)
        assert change.texts == {key: key + b" text" for key in keys}


def listen(engine: Scheduler) -> None:
    until(lambda: not (engine.cache.status.awaits_changes or engine.cache.busy), engine.cache.poll)


def test_blocks_that_are_listed_again_come_once(service: Service, attach: Attach) -> None:
    """Whether or not they had been drained, and have a description."""
    one, other = attach(service), attach(service)
    described, bare = keys_of("a", 3), keys_of("b", 3)
    one.cache.describe(dict.fromkeys(described, b"text"))
    assert one.store(described) == described
    assert one.store(bare) == bare
    for _ in range(3):
        other.cache.watch()
        assert not other.cache.status.has_changes
        listen(other)
    for _ in range(2):
        (change,) = other.cache.drain_changes()
        assert (change.medium, change.removed) == (Medium.HOST, [])
        assert sorted(change.added) == sorted([*described, *bare])
        assert {key for key, text in change.texts.items() if text} == {*described}
        other.cache.watch()
        listen(other)


def test_a_block_that_leaves_before_it_is_repeated_is_not_told(
    service: Service, attach: Attach
) -> None:
    one, other = attach(service), attach(service)
    one.store(keys_of("a", 3))
    other.cache.watch()
    listen(other)
    assert other.cache.drain_changes()
    clear_pools(service.root, None)
    other.cache.watch()  # before it has read that they have left
    until(lambda: not service.pool.cache.status.has_changes, lambda: None)
    listen(other)
    until(lambda: other.cache.drain_changes() == [], other.cache.poll)
    other.cache.watch()
    listen(other)
    assert other.cache.drain_changes() == []
