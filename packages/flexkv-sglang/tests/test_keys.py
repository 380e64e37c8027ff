# SPDX-License-Identifier: Apache-2.0
"""Keys of prompts are made once, and are those that `pack_keys` makes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from sglang_world import hashes_of

from flexkv.types.packed_keys import PackedKeys
from flexkv_kernels.block_index import pack_keys
from flexkv_sglang import keys as keys_module
from flexkv_sglang.keys import PageKeys
from packages.inside_adapters import kept_keys

HASHES = hashes_of("a", 200)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys each call has made."""
    counts: list[int] = []

    def counted(hashes: Sequence[str], end: bytes) -> PackedKeys:
        counts.append(len(hashes))
        return pack_keys(hashes, end)

    monkeypatch.setattr(keys_module, "pack_keys", counted)
    return counts


def test_a_prompt_that_is_looked_up_again_has_its_keys(made: list[int]) -> None:
    pages = PageKeys()
    for start in (0, 0, 100):
        assert list(pages.of(HASHES[start:])) == list(pack_keys(HASHES[start:], b""))
    assert made == [200]


def test_other_pages_get_keys_of_their_own(made: list[int]) -> None:
    pages = PageKeys()
    for hashes in (HASHES[100:], HASHES, HASHES[:150], hashes_of("b", 200), HASHES[:10], []):
        assert list(pages.of(hashes)) == list(pack_keys(hashes, b""))
    assert made == [100, 200, 150, 200, 10, 0]


def test_another_epoch_has_other_keys() -> None:
    pages = PageKeys()
    before = pages.of(HASHES)
    pages.renew(mixed=False)
    assert list(pages.of(HASHES)) == list(pack_keys(HASHES, pages.epoch.end)) != list(before)


def test_kept_keys_have_a_bound(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "_KEPT", 300)
    pages = PageKeys()
    first, second = HASHES[:150], hashes_of("b", 150)
    for hashes in (first, second, first, hashes_of("c", 150), second, first):
        pages.of(hashes)
    assert made == [150, 150, 150, 150]
    assert kept_keys(pages) == 300
    pages.of(hashes_of("d", 301))
    assert kept_keys(pages) == 300
