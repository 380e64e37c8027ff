# SPDX-License-Identifier: Apache-2.0
"""Whether FlexKV counts what was done to it, and whether its counters fit one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from integration.campaign.counts import Counts
from integration.campaign.faults import (
    IN_FILES,
    LOAD_FAILURES,
    READ_FAILURES,
    REFUSALS,
    STORE_FAILURES,
    WRITE_FAILURES,
    Hit,
    Kind,
)
from integration.campaign.verdict import Check


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of an engine block and of a FlexKV block over all layers and ranks, tokens of an engine
    block, and how many ranks there are. `least_bytes`: of a FlexKV block that has no tokens; 0 if
    all are alike."""

    engine_block_bytes: int
    block_bytes: int
    engine_block_tokens: int
    ranks: int = 1
    least_bytes: int = 0

    @property
    def rank_bytes(self) -> int:
        """Of an engine block, on one rank."""
        return self.engine_block_bytes // self.ranks


def check_failures(
    counts: Counts,
    given: Counter[Kind],
    hits: Sequence[Hit],
    *,
    in_parts: bool,
    in_shares: bool = False,
) -> Iterable[Check]:
    """FlexKV counts the failures that there were.

    Args:
        counts: at the end.
        given: faults that were ordered.
        hits: faults that happened.
        in_parts: whether a load is several copies, of which each may have met a fault.
        in_shares: whether a store is, and each copy has a share in each of several pools. A share
            that is refused after another has begun fails the copy, and is no internal failure.
    """

    def failures(cause: str) -> int:
        # Of a shared store nobody counts here what went wrong.
        return sum(
            counts.total("flexkv_failures_total", cause=cause, tier=tier)
            for tier in ("", "host", "disk")
        )

    def done(kinds: Collection[Kind]) -> int:
        return sum(hit.kind in kinds and hit.blocks > 0 for hit in hits)

    def alone(kinds: Collection[Kind]) -> int:
        # What hits a call for several blocks makes FlexKV do them one by one.
        return sum(hit.kind in kinds and hit.blocks == 1 for hit in hits)

    loads = done(LOAD_FAILURES)
    if in_parts:
        yield between("failures: load", failures("load"), min(loads, 1), loads)
    else:
        yield equal("failures: load", failures("load"), loads)
    stores = done(STORE_FAILURES)
    least = min(stores, 1) if in_shares else stores
    yield between("failures: store", failures("store"), least, stores)
    refused = done(REFUSALS)
    least = min(refused, 1) if in_shares else refused
    yield between("failures: internal, refused copies only", failures("internal"), least, refused)
    yield equal("failures: read", failures("read"), alone(READ_FAILURES))
    yield at_most("failures: write", failures("write"), alone(WRITE_FAILURES))
    silent = done({Kind.READ_FLIPPED}) + alone({Kind.READ_NOTHING})
    yield at_least("failures: damaged, reads that lied", failures("damaged"), silent)
    if not any(given[kind] for kind in IN_FILES | {Kind.WRITE_LOST, Kind.WRITE_HALF}):
        yield equal("failures: damaged", failures("damaged"), silent)
    if not given[Kind.DISK_HANGS]:
        yield equal("failures: stalled", failures("stalled"), 0)
    yield equal("resets", counts.value("flexkv_resets_total", cause="request"), given[Kind.RESET])


def check_queries(counts: Counts) -> Iterable[Check]:
    """What host memory has not is looked for on disk."""

    def queries(tier: str) -> int:
        return counts.value("flexkv_query_tokens_total", tier=tier)

    hits = counts.value("flexkv_hit_tokens_total", tier="host")
    what = "queries of disk, and what host memory had not"
    yield equal(what, queries("disk"), queries("host") - hits)


def check_bytes(
    counts: Counts,
    hits: Sequence[Hit],
    sizes: Sizes,
    *,
    all_loaded: bool,
    in_parts: bool,
    blocks_of_hit: int = 1,
) -> Iterable[Check]:
    """What was copied is what was stored and found.

    Args:
        counts: at the end.
        hits: faults that happened.
        sizes: of the engine.
        all_loaded: whether a load that does not fail brings all that was promised.
        in_parts: see `check_failures`. What such a load brings before it fails is counted.
        blocks_of_hit: see `Engine`.
    """

    def copied(link: str, direction: str) -> int:
        return counts.value("flexkv_copied_bytes_total", link=link, direction=direction)

    # Copies fail on one rank; the others count what they copied all the same.
    in_vain = _blocks(hits, STORE_FAILURES) * (sizes.engine_block_bytes - sizes.rank_bytes)
    stored = counts.value("flexkv_stored_blocks_total", tier="host")
    least, most = sizes.least_bytes or sizes.block_bytes, sizes.block_bytes
    at_device = copied("device", "store") - in_vain
    yield between("bytes stored, and blocks", at_device, stored * least, stored * most)
    written = counts.value("flexkv_stored_blocks_total", tier="disk") * sizes.block_bytes
    yield equal("bytes written to disk, and blocks", copied("disk", "write"), written)
    blocks = counts.hit_tokens() // sizes.engine_block_tokens * blocks_of_hit
    promised = blocks * sizes.engine_block_bytes
    failed = 0 if in_parts else _blocks(hits, LOAD_FAILURES) * sizes.rank_bytes
    compare = equal if all_loaded else at_most
    loaded = copied("device", "load") + failed
    yield compare("bytes loaded or failed, and hits", loaded, promised)


def _blocks(hits: Sequence[Hit], kinds: Collection[Kind]) -> int:
    """Engine blocks of the copies that failed so."""
    return sum(hit.blocks for hit in hits if hit.kind in kinds)


def equal(what: str, seen: int, expected: int) -> Check:
    return Check(what, seen == expected, f"{seen} = {expected}")


def between(what: str, seen: int, least: int, most: int) -> Check:
    return Check(what, least <= seen <= most, f"{least} <= {seen} <= {most}")


def at_most(what: str, seen: int, bound: int) -> Check:
    return Check(what, seen <= bound, f"{seen} <= {bound}")


def at_least(what: str, seen: int, bound: int) -> Check:
    return Check(what, seen >= bound, f"{seen} >= {bound}")
