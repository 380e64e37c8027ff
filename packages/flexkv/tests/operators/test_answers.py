# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest

from flexkv.operators.answers import find_blocks
from flexkv.types.changes import Medium

KEYS = [bytes([number]) for number in range(8)]


def where_of(
    host: str, disk: str = "", objects: str = ""
) -> Mapping[Medium, Mapping[bytes, bool | None]]:
    """Tiers by a letter a block: `x` is there, `?` is unknown."""
    kinds = {"x": True, "?": None, ".": False}
    tiers = {Medium.HOST: host, Medium.DISK: disk, Medium.OBJECTS: objects}
    return {
        medium: dict(zip(KEYS, (kinds[each] for each in text.ljust(8, ".")), strict=True))
        for medium, text in tiers.items()
        if text
    }


@pytest.mark.parametrize(
    ("tiers", "found", "blocks", "sure"),
    [
        (("........",), 0, [0], [True]),
        (("xxx.xxxx",), 3, [3], [True]),
        (("xx......", "xxxxx..."), 5, [2, 5], [True, True]),
        (("..xxx...", "xx......"), 5, [3, 2], [True, True]),
        (("x.......", ".x......", "..x?????"), 3, [1, 1, 1], [True, True, False]),
        (("x.......", "?......."), 1, [1, 0], [True, True]),
        (("xxxxxxxx", "xxxx????"), 8, [8, 4], [True, True]),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_tiers_count_in_the_leading_run(
    size: int, tiers: tuple[str, ...], found: int, blocks: list[int], sure: list[bool]
) -> None:
    has = where_of(*tiers)

    def where(keys: Sequence[bytes]) -> Mapping[Medium, Sequence[bool | None]]:
        return {medium: [each[key] for key in keys] for medium, each in has.items()}

    answer = find_blocks(where, (KEYS[i : i + size] for i in range(0, 8, size)))
    assert answer.blocks == found
    assert [each.blocks for each in answer.tiers] == blocks
    assert [each.is_sure for each in answer.tiers] == sure
    assert [each.tier for each in answer.tiers] == ["host", "disk", "objects"][: len(tiers)]


def test_what_follows_the_first_miss_is_not_hashed() -> None:
    def parts() -> Iterator[Sequence[bytes]]:
        yield KEYS
        raise AssertionError("a part that nobody needs")

    assert find_blocks(lambda keys: {Medium.HOST: [False] * len(keys)}, parts()).blocks == 0
