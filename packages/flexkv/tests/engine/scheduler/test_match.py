# SPDX-License-Identifier: Apache-2.0
"""The longest hit, against trying all of them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from flexkv.engine.scheduler.groups import Group, Groups, Reach
from flexkv.engine.scheduler.match import full_reach, longest_hit

SPANS = {Reach.ALL: 0, Reach.STATE: 0}


@st.composite
def models(draw: st.DrawFn) -> Groups:
    reaches = draw(st.lists(st.sampled_from(list(Reach)), min_size=1, max_size=4))
    return Groups(
        tuple(
            Group(
                index,
                reach,
                SPANS.get(reach, draw(st.integers(1, 20))),
                draw(st.sampled_from([2, 4, 6])),
                1,
            )
            for index, reach in enumerate(reaches)
        ),
        2,
    )


@dataclass
class Given:
    """Says of blocks, by group and position, that they can be had; notes those that it is asked
    about."""

    there: Container[tuple[int, int]]
    asked: set[tuple[int, int]] = field(default_factory=set)

    def first_missing(self, group: Group, start: int, stop: int) -> int:
        return next((i for i in range(start, stop) if not self._has(group, i)), stop)

    def last_missing(self, group: Group, start: int, stop: int) -> int | None:
        return next((i for i in reversed(range(start, stop)) if not self._has(group, i)), None)

    def _has(self, group: Group, position: int) -> bool:
        self.asked.add((group.index, position))
        return (group.index, position) in self.there


def is_hit(groups: Groups, there: set[tuple[int, int]], local: int, end: int) -> bool:
    """Whether every block with a token that a layer looks at is there, token by token."""
    for group in groups.members:
        for token in range(local, end):
            match group.reach:
                case Reach.ALL:
                    seen = True
                case Reach.WINDOW:
                    seen = token > end - group.span
                case Reach.CHUNK:
                    seen = token // group.span == end // group.span
                case Reach.STATE:
                    seen = token == end - 1
            if seen and (group.index, token // group.block_tokens) not in there:
                return False
    return True


@given(models(), st.data())
def test_it_is_the_longest_that_has_all_that_is_looked_at(
    groups: Groups, data: st.DataObject
) -> None:
    local = groups.alignment * data.draw(st.integers(0, 3))
    limit = data.draw(st.integers(0, 60))
    blocks = [(g.index, b) for g in groups.members for b in range(limit // g.block_tokens)]
    absent = data.draw(st.sets(st.sampled_from(blocks), max_size=6)) if blocks else set()
    there = {(g, b) for g in range(4) for b in range(31)} - absent
    present = Given(there)
    hit = longest_hit(groups, present, local, limit)
    ends = [
        end
        for end in range(local + 1, limit + 1)
        if end % groups.alignment == 0 and is_hit(groups, there, local, end)
    ]
    assert hit == max(ends, default=local)
    sizes = {group.index: group.block_tokens for group in groups.members}
    assert all(local <= b * sizes[g] and (b + 1) * sizes[g] <= limit for g, b in present.asked)


@given(models(), st.integers(0, 60))
def test_full_reach_looks_at_full_attention_only(groups: Groups, limit: int) -> None:
    full_only = {(g.index, b) for g in groups.members for b in range(60) if g.reach is Reach.ALL}
    reach = full_reach(groups, Given(full_only), 0, limit)
    full = [group for group in groups.members if group.reach is Reach.ALL]
    align = Groups(tuple(full), 2).alignment if full else 1
    assert reach == (limit // align * align if full else 0)
