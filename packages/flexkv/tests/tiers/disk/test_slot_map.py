# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flexkv.tiers.disk.slot_map import NO_SLOT, SlotMap

SLOTS = 12


class Number(int):
    """A key whose place is known: many share one."""

    def __hash__(self) -> int:
        return int(self) // 4


@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 40).map(Number))))
def test_every_key_is_found_in_its_slot_whatever_was_removed(
    steps: list[tuple[int, Number]],
) -> None:
    keys: list[bytes | None] = [None] * SLOTS
    slots = SlotMap(keys)
    model: dict[Number, int] = {}
    for slot, key in steps:
        if keys[slot] is not None:
            slots.remove(slot)
            del model[keys[slot]]  # type: ignore[arg-type]
            keys[slot] = None
        elif key not in model:
            keys[slot] = key  # type: ignore[call-overload]
            slots.add(key, slot)  # type: ignore[arg-type]
            model[key] = slot
        everything = [Number(i) for i in range(41)]
        expected = [model.get(number, NO_SLOT) for number in everything]
        assert slots.get_all(everything) == expected  # type: ignore[arg-type]
        assert [slots.get(number) for number in everything] == expected  # type: ignore[arg-type]


def test_a_full_map_finds_all_and_nothing_else() -> None:
    keys: list[bytes | None] = [i.to_bytes(4, "big") for i in range(1000)]
    slots = SlotMap(keys)
    for i, key in enumerate(keys):
        assert key is not None
        slots.add(key, i)
    assert slots.get_all(key for key in keys if key) == list(range(1000))
    assert slots.get(b"none of them") == NO_SLOT
