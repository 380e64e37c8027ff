# SPDX-License-Identifier: Apache-2.0
"""The longest hit, against trying all of them; what is available, against asking for each block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv.client import CacheInfo, FetchState
from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.choice.chooser import LoadChoice
from flexkv.engine.scheduler.engine_cache import EngineCache
from flexkv.engine.scheduler.groups import Group, Groups, Reach
from flexkv.engine.scheduler.keys import BlockKeys
from flexkv.engine.scheduler.match import Availability, Matcher, full_reach, longest_hit
from flexkv.engine.scheduler.options import RequestOptions
from flexkv.engine.scheduler.request import TrackedRequest
from flexkv.types.changes import Medium
from flexkv.types.presence import Presence

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


FULL = Group(0, Reach.ALL, 0, 16, 1)
WINDOW = Group(1, Reach.WINDOW, 64, 16, 1)
BLOCKS = 80
PLACES = list(Presence)


class Cache:
    """Has blocks where it is told; notes which it is asked about."""

    info = CacheInfo(0, 0, (Medium.DISK,), must_query=False, policy_name="")

    def __init__(self, where: dict[bytes, Presence]) -> None:
        self._where = where
        self.asked: list[bytes] = []
        self.questions = 0

    def presence(self, keys: Sequence[bytes]) -> list[Presence]:
        self.asked += keys
        self.questions += 1
        return [self._where[key] for key in keys]

    def lookup(self, keys: Sequence[bytes]) -> int:
        there = [self._where[key] is Presence.HOST for key in keys]
        return there.index(False) if False in there else len(there)


def make(places: Sequence[Presence], below: bool) -> tuple[Cache, Availability]:
    hashes = [bytes([i]) * 32 for i in range(len(places))]
    keys = BlockKeys(Groups((FULL, WINDOW), 16), lambda _: b"")
    request: Any = SimpleNamespace(request_id="r", block_hashes=hashes, lora_request=None)
    tracked = TrackedRequest(request, RequestOptions())
    where = {
        key: place
        for group in (FULL, WINDOW)
        for key, place in zip(keys.of(tracked, group), places, strict=True)
    }
    cache: Any = Cache(where)
    return cache, Availability(cache, tracked, keys, below=below)


@given(
    st.lists(st.sampled_from(PLACES + 9 * [Presence.HOST]), min_size=BLOCKS - 4, max_size=BLOCKS),
    st.booleans(),
    st.integers(0, BLOCKS),
    st.lists(st.tuples(st.integers(0, BLOCKS), st.integers(0, BLOCKS)), max_size=4),
)
def test_it_finds_the_first_and_the_last_gap(
    places: list[Presence], below: bool, start: int, ranges: list[tuple[int, int]]
) -> None:
    cache, obtainable = make(places, below)
    there = [place is Presence.HOST or (below and place is Presence.BELOW) for place in places] + [
        False
    ] * (BLOCKS + 1)
    asks = sorted((sorted(each) for each in ranges), reverse=True)
    stop = BLOCKS
    for first, last in asks:
        # As a hit becomes shorter.
        stop = min(stop, last)
        begin = min(first, stop)
        expected = next((i for i in range(start, stop) if not there[i]), max(start, stop))
        assert obtainable.first_missing(FULL, start, max(start, stop)) == expected
        gaps = [i for i in range(begin, stop) if not there[i]]
        assert obtainable.last_missing(WINDOW, begin, stop) == max(gaps, default=None)
    windows = [key for key in cache.asked if key.endswith(b"\1")]
    assert len(windows) == len(set(windows)), "each block is looked up once"


@pytest.mark.parametrize("gap", [0, 5, 40])
def test_lower_tiers_are_not_asked_about_much_behind_a_gap(gap: int) -> None:
    places = [Presence.BELOW] * gap + [Presence.ABSENT] + [Presence.BELOW] * 40
    cache, obtainable = make(places, below=True)
    assert obtainable.first_missing(FULL, 0, len(places)) == gap
    assert len(cache.asked) <= 16 + 2 * gap


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("gap", [0, 30, BLOCKS])
def test_a_farther_end_is_asked_for_after_a_nearer_one(gap: int, below: bool) -> None:
    """As where windows come before full attention, and leave nothing of a hit."""
    places = [Presence.HOST] * gap + [Presence.ABSENT] * (BLOCKS - gap)
    cache, obtainable = make(places, below)
    for stop in (0, 20, BLOCKS, 50):
        assert obtainable.first_missing(FULL, 0, stop) == min(gap, stop)
    assert len(cache.asked) == len(set(cache.asked))


def test_a_window_that_nothing_has_is_looked_up_in_few_calls() -> None:
    """With pages of one token, a prompt has tens of thousands."""
    cache, obtainable = make([Presence.ABSENT] * 256, below=True)
    stop = 256
    while (missing := obtainable.last_missing(WINDOW, max(0, stop - 1), stop)) is not None:
        stop = missing
    assert stop == 0
    assert cache.questions <= 16


def plain(there: dict[Group, list[bool]]) -> Any:
    """`Present`, asked anew each time."""

    def first_missing(group: Group, start: int, stop: int) -> int:
        return next((i for i in range(start, stop) if not there[group][i]), stop)

    def last_missing(group: Group, start: int, stop: int) -> int | None:
        return next((i for i in reversed(range(start, stop)) if not there[group][i]), None)

    return SimpleNamespace(first_missing=first_missing, last_missing=last_missing)


@given(
    st.permutations([FULL, WINDOW]),
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_in_any_order_of_groups_a_hit_and_where_prompts_part_are_those_of_single_asks(
    members: list[Group], full: list[bool], window: list[bool]
) -> None:
    """Models name their windows before full attention."""
    groups = Groups(tuple(members), 16)
    hashes = [bytes([i]) * 32 for i in range(12)]
    keys = BlockKeys(groups, lambda _: b"")
    request: Any = SimpleNamespace(request_id="r", block_hashes=hashes, lora_request=None)
    tracked = TrackedRequest(request, RequestOptions())
    there = {FULL: full, WINDOW: window}
    cache: Any = Cache(
        {
            key: Presence.HOST if has else Presence.ABSENT
            for group in members
            for key, has in zip(keys.of(tracked, group), there[group], strict=True)
        }
    )
    obtainable = Availability(cache, tracked, keys, below=True)
    limit = 12 * 16
    assert longest_hit(groups, obtainable, 0, limit) == longest_hit(groups, plain(there), 0, limit)
    assert full_reach(groups, obtainable, 0, limit) == full_reach(groups, plain(there), 0, limit)


@pytest.mark.parametrize("brings", [3, 8])
def test_nobody_waits_for_a_part_of_the_blocks_that_a_window_needs(brings: int) -> None:
    """The service brings as many blocks as one of several engines may hold."""
    groups, ended = Groups((FULL, WINDOW), 16), list[int]()
    keys: Any = BlockKeys(groups, lambda _: b"")
    cache: Any = Cache(defaultdict(lambda: Presence.BELOW))
    cache.fetch = lambda *_, **__: 1
    cache.fetch_state = lambda _: FetchState(0.0, brings, stop=brings, reach=brings)
    cache.end_fetch = ended.append
    cache.status = SimpleNamespace(disabled=False)
    chooser: Any = SimpleNamespace(
        is_worth_waiting=lambda *_, **__: True,
        choose_load=lambda _, blocks, **__: LoadChoice(blocks),
        fetched=lambda *_: None,
    )
    none: Any = None
    matcher = Matcher(EngineCache(none, cache, groups, keys, chooser, ErrorBoundary()), True)
    hashes = [bytes([i]) * 32 for i in range(4)]
    request: Any = SimpleNamespace(
        request_id="r", block_hashes=hashes, lora_request=None, num_tokens=65
    )
    found = matcher.match(TrackedRequest(request, RequestOptions()), 0, 0)
    assert (found, ended) == (((None, False), []) if brings == 8 else ((0, False), [1]))
