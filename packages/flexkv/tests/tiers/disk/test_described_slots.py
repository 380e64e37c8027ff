# SPDX-License-Identifier: Apache-2.0
"""Descriptions are read a little ahead of the blocks that are reported, few at once."""

from __future__ import annotations

from collections.abc import Iterator

from flexkv.tiers.disk.descriptions import DescribedSlots, Part

TEXT = bytes(100)


def parts_of(count: int, asked: list[int]) -> Iterator[Part]:
    for number in range(count):
        asked.append(number)
        yield 2 * number + 2, {b"%d" % slot: TEXT for slot in (2 * number, 2 * number + 1)}


def test_two_parts_are_read_ahead_and_those_of_reported_slots_forgotten() -> None:
    asked: list[int] = []
    slots = DescribedSlots(parts_of(3, asked), 10)
    assert slots.stop_slot == 0
    while slots.is_wanted:
        slots.read_part()
    assert (asked, slots.stop_slot) == ([0, 1], 4)
    assert slots.take([b"0", b"3", b"4"]) == {b"0": TEXT, b"3": TEXT}
    assert slots.take([b"0"]) == {}, "each once"
    slots.forget(1)
    assert not slots.is_wanted
    slots.forget(2)
    assert slots.is_wanted
    while slots.is_wanted:
        slots.read_part()
        slots.forget(slots.stop_slot)
    assert (asked, slots.stop_slot) == ([0, 1, 2], 10)


def test_few_blocks_with_descriptions_are_reported_at_once() -> None:
    slots = DescribedSlots(parts_of(1, []), 10)
    assert slots.limit(2048) == 2048
    slots.read_part()
    assert slots.limit(2048) == 64
    assert slots.limit(3) == 3
    slots.forget(2)
    assert slots.limit(2048) == 2048


def test_long_descriptions_are_reported_in_smaller_numbers() -> None:
    for length, blocks in ((1 << 10, 16), (1 << 14, 1), (1 << 16, 1)):
        slots = DescribedSlots(iter([(1, {b"key": bytes(length)})]), 1)
        slots.read_part()
        assert slots.limit(2048) == blocks


def test_a_failed_read_reports_the_other_slots_without_descriptions() -> None:
    slots = DescribedSlots(parts_of(3, []), 10)
    slots.read_part()
    slots.stop()
    assert not slots.is_wanted
    assert slots.stop_slot == 10
    assert slots.take([b"0", b"2"]) == {b"0": TEXT}


def test_without_descriptions_all_blocks_are_reported() -> None:
    slots = DescribedSlots(None, 10)
    assert (slots.is_wanted, slots.stop_slot, slots.limit(2048)) == (False, 10, 2048)
