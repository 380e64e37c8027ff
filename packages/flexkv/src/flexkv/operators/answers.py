# SPDX-License-Identifier: Apache-2.0
"""What engines and services do alike for an answer: count what tiers have of a prompt, and wait for
the drives that blocks were removed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple, TypeAlias

from flexkv.operators.verbs import TierPlaces
from flexkv.types.changes import Medium

CLEAR_SECONDS = 120.0
"""Time limit for the answer to a removal: a busy drive may take a minute."""

_SYNC_SECONDS = 100.0
"""The longest wait for drives, so that the answer names those that hang within `CLEAR_SECONDS`."""

Where: TypeAlias = Callable[[Sequence[bytes]], Mapping[Medium, Sequence[bool | None]]]
"""See `CacheClient.where`."""


class FoundBlocks(NamedTuple):
    """How many blocks of a prompt some tier has, from the first on, and which tier has how many of
    them."""

    blocks: int
    tiers: tuple[TierPlaces, ...]


def find_blocks(where: Where, parts: Iterable[Sequence[bytes]]) -> FoundBlocks:
    """Count the blocks of a prompt in all tiers, up to the first that none has for certain. Of the
    keys in `parts`, those behind that block are not taken."""
    found = 0
    counts: dict[Medium, int] = {}
    for keys in parts:
        has = where(keys)
        by_block = zip(*has.values(), strict=True)
        run = next((i for i, each in enumerate(by_block) if True not in each), len(keys))
        for medium, answers in has.items():
            counts[medium] = counts.get(medium, 0) + sum(each is True for each in answers[:run])
        found += run
        if run < len(keys):
            unsure = {medium for medium, answers in has.items() if answers[run] is None}
            break
    else:
        unsure = set()
    tiers = (
        TierPlaces(medium.value, count, medium not in unsure) for medium, count in counts.items()
    )
    return FoundBlocks(found, tuple(tiers))


def await_removals(asked: Sequence[Future[str]]) -> str:
    """Wait until the drives keep removals over a power failure; `asked` is what the cache's `sync`
    has returned. Returns why a later process may find removed blocks; empty if there is no reason.
    """
    done, hanging = wait(asked, _SYNC_SECONDS)
    reasons = [each.result() for each in asked if each in done]
    if hanging:
        reasons.append(
            f"{len(hanging)} cache directories have not confirmed it for {_SYNC_SECONDS:g} s; run "
            "the command again"
        )
    return "; ".join(filter(None, reasons))
