# SPDX-License-Identifier: Apache-2.0
"""Finds how many pages of a prefix can be restored. Some pools keep all pages; others keep only the
last pages before certain lengths of the prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class PoolPages(NamedTuple):
    """For each page of the prompt whether a pool other than the KV pool has it; and how many pages
    before its end a prefix needs, None for all."""

    present: Sequence[bool]
    trailing: int | None = None


class Hit(NamedTuple):
    """The prefixes that can be restored, as SGLang's `PoolTransferResult` has them. Lengths count
    pages.

    Attributes:
        pages: length of the longest prefix that all pools have.
        by_pool: for each pool the length of the longest prefix that it and the KV pool have. Pools
            without such a prefix are left out.
        restorable: the lengths of all prefixes that all pools have, sorted.
    """

    pages: int
    by_pool: dict[str, int]
    restorable: list[int]


def leading(present: Sequence[bool]) -> int:
    """The number of pages before the first that is missing."""
    return present.index(False) if False in present else len(present)


def find_hit(name: str, kv: Sequence[bool], others: Mapping[str, PoolPages]) -> Hit:
    """Find the prefixes that can be restored. `name` is that of the KV pool."""
    pages = leading(kv)
    by_pool = {name: pages} if pages else {}
    restorable = set(range(1, pages + 1))
    for other, there in others.items():
        lengths = _lengths(there, pages)
        if lengths:
            by_pool[other] = max(lengths)
        restorable &= lengths
    return Hit(max(restorable, default=0), by_pool, sorted(restorable))


def _lengths(pool: PoolPages, longest: int) -> set[int]:
    """Lengths of the prefixes of up to `longest` pages whose needed pages a pool has."""
    lengths = set()
    run = 0
    for length, present in enumerate(pool.present[:longest], 1):
        run = run + 1 if present else 0
        if run >= min(length, pool.trailing or length):
            lengths.add(length)
    return lengths
