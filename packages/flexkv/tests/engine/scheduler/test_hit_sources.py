# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from flexkv.client import AwaitedBlocks, FetchState
from flexkv.engine.scheduler.fetches import fetched_blocks, note_media, slowest
from flexkv.engine.scheduler.request import limited
from flexkv.types.changes import Medium

KEYS = [bytes([i]) for i in range(8)]


def test_blocks_count_for_the_tier_that_the_last_fetch_took_them_from() -> None:
    first = FetchState(
        0.0, awaited=(AwaitedBlocks(0, 2, Medium.DISK), AwaitedBlocks(4, 6, Medium.OBJECTS))
    )
    second = FetchState(0.0, awaited=(AwaitedBlocks(0, 1, Medium.MOONCAKE),))
    media: dict[bytes, Medium] = {}
    note_media(media, KEYS, first)
    note_media(media, KEYS[1:], second)
    assert fetched_blocks(media, KEYS) == {Medium.DISK: 1, Medium.MOONCAKE: 1, Medium.OBJECTS: 2}
    assert fetched_blocks(media, KEYS[:2]) == {Medium.DISK: 1, Medium.MOONCAKE: 1}


def test_blocks_that_no_tier_gave_are_those_of_host_memory() -> None:
    media = {KEYS[0]: Medium.HOST, KEYS[1]: Medium.DISK}
    assert fetched_blocks(media, KEYS) == {Medium.DISK: 1}
    assert fetched_blocks({}, KEYS) == {}


def test_the_slowest_tiers_keep_their_tokens_first() -> None:
    fetched = {Medium.DISK: 10, Medium.OBJECTS: 5}
    assert slowest(fetched) is Medium.OBJECTS
    assert limited(fetched, 7) == {Medium.OBJECTS: 5, Medium.DISK: 2}
