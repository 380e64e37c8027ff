# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv.engine.orders import EVERYTHING
from flexkv.engine.scheduler.access_log import access_log

BLOCKS = st.lists(st.integers(1, 9), max_size=4)
REQUESTS = st.sampled_from("abcd")
STEPS = st.lists(
    st.tuples(
        st.sets(REQUESTS),
        BLOCKS,
        st.dictionaries(REQUESTS, BLOCKS),
        st.dictionaries(REQUESTS, BLOCKS),
    ),
    max_size=12,
)
"""Of each step the requests that have ended, the blocks that it touches, those that requests have
now, and those that they get."""
Step = tuple[set[str], list[int], dict[str, list[int]], dict[str, list[int]]]


@given(STEPS)
def test_no_use_of_a_block_is_forgotten(steps: list[Step]) -> None:
    """Every request that has blocks uses them in each step; against that, step by step."""
    uses = access_log()
    tables: dict[str, list[int]] = {}
    last: dict[int, int] = {}
    for number, (ended, touched, given_, added) in enumerate(steps, start=1):
        uses.begin_step(ended)
        uses.touched(touched)
        tables = {name: table for name, table in tables.items() if name not in ended}
        last.update(dict.fromkeys(touched, number))
        for block in range(1, 11):
            held = any(block in table for table in tables.values())
            assert uses.last_use([block]) == (EVERYTHING if held else last.get(block, 0))
        free = [block for block in range(1, 11) if uses.last_use([block]) != EVERYTHING]
        assert uses.last_use(free) == max((last.get(block, 0) for block in free), default=0)
        for name, blocks in given_.items():
            uses.give(name, blocks)
            tables[name] = list(blocks)
        known = {name: blocks for name, blocks in added.items() if name in tables}
        replaced = {name for name in known if name < "b" and name not in given_}
        uses.follow([*known, "z"], [*([blocks] for blocks in known.values()), None], replaced)
        for name, blocks in known.items():
            tables[name] = list(blocks) if name in replaced else tables[name] + blocks
        uses.check(tables)
        last.update({block: number for table in tables.values() for block in table})


def test_blocks_that_were_replaced_were_used_up_to_then() -> None:
    uses = access_log()
    uses.begin_step([])
    uses.give("a", [1, 2])
    uses.begin_step([])
    uses.begin_step([])
    uses.give("a", [2, 3])
    uses.begin_step([])
    assert uses.last_use([1]) == 2
    assert uses.last_use([2]) == uses.last_use([3]) == EVERYTHING


def test_in_doubt_every_load_follows_everything() -> None:
    for doubt in (
        lambda uses: uses.follow(["unknown"], [([3],)], set()),
        lambda uses: uses.check({"unknown": 1}),
        lambda uses: uses.lose(),
    ):
        uses = access_log()
        uses.begin_step([])
        assert uses.last_use([3]) == 0
        doubt(uses)
        uses.begin_step([])
        assert uses.last_use([3]) == EVERYTHING
        uses.give("a", [3])
        uses.begin_step(["a"])
        assert uses.last_use([3]) == EVERYTHING


def test_what_is_replaced_and_touched_in_one_step_was_used_in_it() -> None:
    uses = access_log()
    uses.begin_step([])
    uses.give("a", [1])
    uses.begin_step([])
    uses.touched([1])
    uses.give("a", [2])
    assert uses.last_use([1]) == uses.step == 2


@pytest.mark.parametrize("block", [-1, 1 << 26, 1 << 70])
def test_a_block_that_no_engine_has_is_refused(block: int) -> None:
    uses = access_log()
    with pytest.raises((ValueError, OverflowError)):
        uses.give("a", [block])


def test_blocks_of_several_groups_are_refused() -> None:
    uses = access_log()
    uses.give("a", [1])
    with pytest.raises(ValueError, match="blocks of 2 groups; allowed: those of one"):
        uses.follow(["a"], [([2], [3])], set())
