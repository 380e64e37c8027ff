# SPDX-License-Identifier: Apache-2.0
"""How much of a prompt can be loaded if groups of layers need different blocks of it. Pure."""

from __future__ import annotations

from typing import Protocol

from flexkv.adapter.groups import Group, Groups, Reach


class Present(Protocol):
    """Which FlexKV blocks of a request can be had, by group and position."""

    def first_missing(self, group: Group, start: int, stop: int) -> int:
        """The first block from `start` on that cannot be had; `stop` if all before it can."""
        ...

    def last_missing(self, group: Group, start: int, stop: int) -> int | None:
        """The last block from `start` on and before `stop` that cannot be had; None if all can."""
        ...


def longest_hit(groups: Groups, present: Present, local_tokens: int, limit: int) -> int:
    """The longest prefix that can be computed on if what `present` says is loaded, in tokens.

    Args:
        groups: of the model.
        present: asked only about blocks from `local_tokens` on and before `limit`.
        local_tokens: the engine has itself, in all groups; a multiple of the alignment.
        limit: tokens at most.

    Returns:
        A multiple of the alignment, or `local_tokens` if nothing can be loaded.
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
    """The longest prefix, of `hit` tokens at most, for which `group` has all that it needs."""
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
        # Every prefix that ends behind the missing block needs it too.
        hit = missing * size // align * align
    return local_tokens
