# SPDX-License-Identifier: Apache-2.0
"""Finds the loadable prefix of a prompt whose groups of layers need different blocks. Pure."""

from __future__ import annotations

from typing import Protocol

from flexkv.engine.scheduler.groups import Group, Groups, Reach


class Present(Protocol):
    """Which FlexKV blocks of a request are available, by group and position."""

    def first_missing(self, group: Group, start: int, stop: int) -> int:
        """The first unavailable block from `start` on; `stop` if all before `stop` are
        available."""
        ...

    def last_missing(self, group: Group, start: int, stop: int) -> int | None:
        """The last unavailable block from `start` to before `stop`; None if all are available."""
        ...


def longest_hit(groups: Groups, present: Present, local_tokens: int, limit: int) -> int:
    """The longest prefix, in tokens, that the engine can continue after loading available blocks.

    Args:
        groups: the groups of the model.
        present: asked only about blocks from `local_tokens` on and before `limit`.
        local_tokens: tokens that the engine has in all groups; a multiple of the alignment.
        limit: the most tokens of the prefix.

    Returns:
        A multiple of the alignment, or `local_tokens` if no block can be loaded.
    """
    align = groups.alignment
    hit = limit // align * align
    while hit > local_tokens:
        shorter = hit
        for group in groups.members:
            shorter = _supported(group, present, local_tokens, shorter, align)
        if shorter == hit:
            return hit
        hit = shorter
    return local_tokens


def full_reach(groups: Groups, present: Present, local_tokens: int, limit: int) -> int:
    """The same for the groups of full attention alone; `local_tokens` if there is none."""
    members = tuple(group for group in groups.members if group.reach is Reach.ALL)
    if not members:
        return local_tokens
    return longest_hit(Groups(members, groups.hash_tokens), present, local_tokens, limit)


def _supported(group: Group, present: Present, local_tokens: int, hit: int, align: int) -> int:
    """The longest prefix of at most `hit` tokens for which `group` has all blocks it needs."""
    size = group.block_tokens
    first = local_tokens // size
    if group.reach is Reach.ALL:
        gap = present.first_missing(group, first, hit // size)
        return max(local_tokens, gap * size // align * align)
    while hit > local_tokens:
        start = max(first, group.first_needed(hit))
        missing = present.last_missing(group, start, hit // size)
        if missing is None:
            return hit
        # Every prefix that ends behind the missing block needs that block, too.
        hit = missing * size // align * align
    return local_tokens
