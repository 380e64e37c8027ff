# SPDX-License-Identifier: Apache-2.0
"""How many pages of a prefix can be restored, if some pools keep all pages and others the last
few before certain boundaries."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class Need(enum.Enum):
    """Which pages of a pool a prefix needs; the values are SGLang's."""

    ALL = "all_pages"
    TRAILING = "trailing_pages"


@dataclass(frozen=True, slots=True)
class PoolPages:
    """What is there of a pool beside the KV.

    Attributes:
        need: which pages a prefix needs.
        present: for each page of the chain whether it is there.
        trailing: how many pages before the end of a prefix, for `Need.TRAILING`.
    """

    need: Need
    present: Sequence[bool]
    trailing: int = 1


@dataclass(frozen=True, slots=True)
class Hit:
    """What can be restored.

    Attributes:
        pages: of the longest prefix that every pool has.
        by_pool: of the longest prefix that each pool has by itself, those that have none left out.
        restorable: all lengths of prefixes that every pool has.
    """

    pages: int
    by_pool: dict[str, int]
    restorable: list[int]


def leading(present: Sequence[bool]) -> int:
    """Pages from the first on that are there."""
    return present.index(False) if False in present else len(present)


def find_hit(name: str, kv: Sequence[bool], others: Mapping[str, PoolPages]) -> Hit:
    """The prefixes that can be restored.

    Args:
        name: of the KV pool.
        kv: for each page of the chain whether its KV is there.
        others: pools beside it, by name.
    """
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
    """Prefixes of up to `longest` pages for which a pool has what they need."""
    lengths = set()
    run = 0
    for length, present in enumerate(pool.present[:longest], 1):
        run = run + 1 if present else 0
        needed = length if pool.need is Need.ALL else min(pool.trailing, length)
        if run >= needed:
            lengths.add(length)
    return lengths
