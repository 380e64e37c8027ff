# SPDX-License-Identifier: Apache-2.0
"""What a block is called: which of vLLM's hashes, and what else tells it from others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from flexkv.adapter.groups import Group, Groups, Reach
from flexkv.adapter.keys import BlockKeys
from flexkv_vllm.identity import adapter_stamp, request_stamp

FULL = Group(0, Reach.ALL, 0, 16, 2)
WINDOW = Group(3, Reach.WINDOW, 64, 32, 2)
HASHES = [bytes([number]) * 32 for number in range(9)]
"""Of 16 tokens each: four blocks of the full attention, two of the window, and a rest."""


def request(adapter: LoRARequest | None = None) -> Any:
    return SimpleNamespace(block_hashes=HASHES, lora_request=adapter)


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


def test_the_keys_of_several_groups_end_with_their_numbers() -> None:
    keys = BlockKeys(Groups((FULL, WINDOW), 16), request_stamp)
    assert not keys.are_hashes
    assert keys.of(request(), FULL, stop=1) == [HASHES[1] + b"\0"]
    assert keys.of(request(), WINDOW) == [HASHES[3] + b"\3", HASHES[7] + b"\3"]


def test_the_keys_of_an_adapter_end_with_its_stamp() -> None:
    adapter = LoRARequest("name", 1, "someone/something")
    stamp = adapter_stamp(adapter)
    assert len(stamp) == 16
    one = BlockKeys(Groups((FULL,), 16), request_stamp)
    assert one.of(request(adapter), FULL, stop=1) == [HASHES[1] + stamp]
    several = BlockKeys(Groups((FULL, WINDOW), 16), request_stamp)
    assert several.of(request(adapter), WINDOW, stop=1) == [HASHES[3] + b"\3" + stamp]
