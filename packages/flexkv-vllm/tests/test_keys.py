# SPDX-License-Identifier: Apache-2.0
"""What a block is called: which of vLLM's hashes, and what else tells it from others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from flexkv.engine.scheduler.groups import Group, Groups, Reach
from flexkv.engine.scheduler.keys import BlockKeys
from flexkv.engine.scheduler.options import RequestOptions
from flexkv.engine.scheduler.request import TrackedRequest
from flexkv_vllm.keys import adapter_stamp, request_stamp

FULL = Group(0, Reach.ALL, 0, 16, 2)
OTHER = Group(5, Reach.ALL, 0, 16, 2)
WINDOW = Group(3, Reach.WINDOW, 64, 32, 2)
HASHES = [bytes([number]) * 32 for number in range(9)]
"""Of 16 tokens each: four blocks of the full attention, two of the window, and a rest."""


def request(adapter: LoRARequest | None = None) -> TrackedRequest:
    vllms: Any = SimpleNamespace(request_id="r", block_hashes=list(HASHES), lora_request=adapter)
    return TrackedRequest(vllms, RequestOptions())


@pytest.mark.parametrize(
    ("start", "stop", "last"),
    [
        (0, None, [1, 3, 5, 7]),
        (0, 2, [1, 3]),
        (1, 3, [3, 5]),
        (2, None, [5, 7]),
        (3, 9, [7]),
        (4, None, []),
        (1, 1, []),
    ],
)
def test_a_key_is_the_hash_of_the_blocks_last_tokens(
    start: int, stop: int | None, last: list[int]
) -> None:
    keys = BlockKeys(Groups((FULL,), 16), request_stamp)
    assert keys.are_hashes
    assert list(keys.of(request(), FULL, start, stop)) == [HASHES[number] for number in last]


def test_the_keys_of_all_groups_but_one_end_with_their_numbers() -> None:
    keys = BlockKeys(Groups((WINDOW, FULL, OTHER), 16), request_stamp)
    assert not keys.are_hashes
    assert keys.of(request(), FULL, stop=1) == [HASHES[1]]
    assert keys.of(request(), OTHER, stop=1) == [HASHES[1] + b"\5"]
    assert keys.of(request(), WINDOW) == [HASHES[3] + b"\3", HASHES[7] + b"\3"]


def test_the_keys_of_an_adapter_end_with_its_stamp() -> None:
    adapter = LoRARequest("name", 1, "someone/something")
    stamp = adapter_stamp(adapter)
    assert len(stamp) == 16
    one = BlockKeys(Groups((FULL,), 16), request_stamp)
    assert one.of(request(adapter), FULL, stop=1) == [HASHES[1] + stamp]
    several = BlockKeys(Groups((FULL, WINDOW), 16), request_stamp)
    assert several.of(request(adapter), WINDOW, stop=1) == [HASHES[3] + b"\3" + stamp]


def test_a_key_without_a_stamp_says_its_group_and_hash() -> None:
    for groups in ((FULL,), (WINDOW, OTHER, FULL), (WINDOW,)):
        keys = BlockKeys(Groups(groups, 16), request_stamp)
        for group in groups:
            (key,) = keys.of(request(), group, stop=1)
            last = group.block_tokens // 16 - 1
            assert keys.origin(key) == (group.index, HASHES[last])


def test_keys_are_made_once() -> None:
    keys, tracked = BlockKeys(Groups((FULL, OTHER), 16), request_stamp), request()
    first = keys.of(tracked, OTHER, stop=2)
    assert [id(key) for key in keys.of(tracked, OTHER)[:2]] == [id(key) for key in first]


def test_keys_follow_the_hashes_that_vllm_adds_and_takes_back() -> None:
    """It takes some back where a session goes on differently."""
    keys, tracked = BlockKeys(Groups((FULL, OTHER), 16), request_stamp), request()
    hashes: Any = tracked.request.block_hashes
    assert len(keys.of(tracked, OTHER)) == 4
    hashes.append(b"new" * 10)
    assert list(keys.of(tracked, OTHER, 3)) == [HASHES[7] + b"\5", b"new" * 10 + b"\5"]
    del hashes[6:]
    assert list(keys.of(tracked, OTHER, 2)) == [HASHES[5] + b"\5"]
    hashes += [b"u" * 32, b"v" * 32]
    assert list(keys.of(tracked, OTHER, 2)) == [HASHES[5] + b"\5", b"v" * 32 + b"\5"]
    hashes[6:] = [b"w" * 32, b"x" * 32, b"y" * 32]
    assert list(keys.of(tracked, OTHER, 3)) == [b"x" * 32 + b"\5"]


def test_another_epoch_has_other_keys_for_all_groups() -> None:
    keys, tracked = BlockKeys(Groups((FULL, OTHER, WINDOW), 16), request_stamp), request()
    groups = (FULL, OTHER, WINDOW)
    before = [key for group in groups for key in keys.of(tracked, group)]
    epochs = []
    for _ in range(2):
        keys.epoch.renew()
        epochs.append([key for group in groups for key in keys.of(tracked, group)])
    assert len({*before, *epochs[0], *epochs[1]}) == 3 * len(before)
    assert [keys.origin(key) for key in epochs[0]] == [None] * len(before)
    first = [keys.origin(key) for key in epochs[1]]
    assert first == [BlockKeys(Groups(groups, 16), request_stamp).origin(key) for key in before]


def test_the_first_epoch_knows_keys_of_later_ones() -> None:
    """A disk has them from a process that ended."""
    first, later = (BlockKeys(Groups((FULL,), 16), request_stamp) for _ in range(2))
    later.epoch.renew()
    assert [first.origin(key) for key in later.of(request(), FULL)] == [None] * 4
