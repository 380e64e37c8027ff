# SPDX-License-Identifier: Apache-2.0
"""Keys of prompts are made once, and are those that `pack_keys` makes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from sglang_world import hashes_of

from flexkv.index.packed_keys import PackedKeys, pack_keys
from flexkv_sglang import key_epoch
from flexkv_sglang.key_epoch import KeyEpoch

HASHES = hashes_of("a", 200)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys each call has made."""
    counts: list[int] = []

    def counted(hashes: Sequence[str], end: bytes) -> PackedKeys:
        counts.append(len(hashes))
        return pack_keys(hashes, end)

    monkeypatch.setattr(key_epoch, "pack_keys", counted)
    return counts


def test_a_prompt_that_is_looked_up_again_has_its_keys(made: list[int]) -> None:
    epoch = KeyEpoch()
    for start in (0, 0, 100):
        assert list(epoch.keys_of(HASHES[start:])) == list(pack_keys(HASHES[start:], b""))
    assert made == [200]


def test_other_pages_get_keys_of_their_own(made: list[int]) -> None:
    epoch = KeyEpoch()
    for hashes in (HASHES[100:], HASHES, HASHES[:150], hashes_of("b", 200), HASHES[:10], []):
        assert list(epoch.keys_of(hashes)) == list(pack_keys(hashes, b""))
    assert made == [100, 200, 150, 200, 10, 0]


def test_another_epoch_has_other_keys() -> None:
    epoch = KeyEpoch()
    before = epoch.keys_of(HASHES)
    epoch.renew(mixed=False)
    assert list(epoch.keys_of(HASHES)) == list(pack_keys(HASHES, epoch.end)) != list(before)


def test_kept_keys_have_a_bound(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_epoch, "_KEPT", 300)
    epoch = KeyEpoch()
    first, second = HASHES[:150], hashes_of("b", 150)
    for hashes in (first, second, first, hashes_of("c", 150), second, first):
        epoch.keys_of(hashes)
    assert made == [150, 150, 150, 150]
    assert epoch._kept_keys == 300
    epoch.keys_of(hashes_of("d", 301))
    assert epoch._kept_keys == 300
