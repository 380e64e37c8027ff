# SPDX-License-Identifier: Apache-2.0
"""What a campaign must have shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from integration.campaign.clients import Outcome, Request
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

_HEARD_SECONDS = 5.0
"""Within which a server has heard that a client hung up: its engine may begin the request's load
until then."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must hold, and what was seen."""

    what: str
    held: bool
    seen: str


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of an engine block and of a FlexKV block over all layers and ranks, tokens of an engine
    block and of the longest request, and how many ranks there are."""

    engine_block_bytes: int
    block_bytes: int
    engine_block_tokens: int
    longest_tokens: int
    ranks: int = 1

    @property
    def rank_bytes(self) -> int:
        """Of an engine block, on one rank."""
        return self.engine_block_bytes // self.ranks


def check_requests(
    policy: str, requests: Sequence[Request], hits: Sequence[Hit]
) -> Iterable[Check]:
    """No wrong token, no hang, and no error but where a load failed that vLLM was told to mind."""
    by_outcome = Counter(request.outcome for request in requests)
    wrong = [request for request in requests if request.outcome is Outcome.WRONG]
    yield Check("no request got a wrong token", not wrong, "; ".join(map(str, wrong[:3])))
    yield Check("no request hung", not by_outcome[Outcome.HUNG], str(by_outcome[Outcome.HUNG]))
    failed = [request for request in requests if request.outcome is Outcome.FAILED]
    if policy == "recompute":
        yield Check("no request failed", not failed, "; ".join(map(str, failed[:3])))
        return
    failures = [hit for hit in hits if hit.kind in LOAD_FAILURES]
    unexplained, _ = match(failed, failures)
    yield Check(
        "a request failed only if its load did",
        not unexplained,
        f"{len(failed)} failed, {len(failures)} loads: {'; '.join(map(str, unexplained[:3]))}",
    )
    ended = [
        replace(request, ended=request.ended + _HEARD_SECONDS)
        for request in requests
        if request.outcome is Outcome.ABORTED
    ]
    _, unanswered = match([*failed, *ended], failures)
    yield Check(
        "a request whose load failed got no answer",
        not unanswered,
        "; ".join(map(str, unanswered[:3])),
    )


def match(requests: Iterable[Request], hits: Iterable[Hit]) -> tuple[list[Request], list[Hit]]:
    """Pair as many requests as possible with a hit each, that was while the request ran.

    Returns the requests and the hits that are left.
    """
    left = sorted(requests, key=lambda request: request.ended)
    unused = []
    for hit in sorted(hits, key=lambda hit: hit.time):
        # Of those that it can belong to, the one that has the fewest hits still to come.
        found = next((each for each in left if each.begun <= hit.time <= each.ended), None)
        if found is None:
            unused.append(hit)
        else:
            left.remove(found)
    return left, unused


def check_counters(
    counts: Counts, given: Counter[Kind], hits: Sequence[Hit], policy: str, sizes: Sizes
) -> Iterable[Check]:
    """FlexKV counts what was done to it, and its counters fit one another and vLLM's."""

    def failures(cause: str) -> int:
        return counts.total("flexkv_failures_total", cause=cause)

    def done(kinds: Collection[Kind]) -> int:
        return sum(hit.kind in kinds for hit in hits)

    def alone(kinds: Collection[Kind]) -> int:
        # What hits a call for several blocks makes FlexKV do them one by one.
        return sum(hit.kind in kinds and hit.blocks == 1 for hit in hits)

    yield _equal("failures: load", failures("load"), done(LOAD_FAILURES))
    yield _equal("failures: store", failures("store"), done(STORE_FAILURES))
    yield _equal("failures: internal, refused copies only", failures("internal"), done(REFUSALS))
    yield _equal("failures: read", failures("read"), alone(READ_FAILURES))
    yield _at_most("failures: write", failures("write"), alone(WRITE_FAILURES))
    silent = done({Kind.READ_FLIPPED}) + alone({Kind.READ_NOTHING})
    yield _at_least("failures: damaged, reads that lied", failures("damaged"), silent)
    if not any(given[kind] for kind in IN_FILES | {Kind.WRITE_LOST, Kind.WRITE_HALF}):
        yield _equal("failures: damaged", failures("damaged"), silent)
    if not given[Kind.DISK_HANGS]:
        yield _equal("failures: stalled", failures("stalled"), 0)
    yield _equal("resets", counts.value("flexkv_resets_total"), given[Kind.RESET])
    yield from _check_tokens(counts, sizes.longest_tokens)
    yield from _check_bytes(counts, hits, policy, sizes)


def _check_tokens(counts: Counts, longest: int) -> Iterable[Check]:
    queries = {tier: counts.value("flexkv_query_tokens_total", tier=tier) for tier in _TIERS}
    hits = {tier: counts.value("flexkv_hit_tokens_total", tier=tier) for tier in _TIERS}
    asked = counts.value("external_prefix_cache_queries_total")
    found = counts.value("external_prefix_cache_hits_total")
    # vLLM leaves out what it asks for again after a preemption.
    again = counts.value("num_preemptions_total") * longest
    yield _between("queries of host memory, and vLLM's", queries["host"], asked, asked + again)
    yield _between("hits of both tiers, and vLLM's", sum(hits.values()), found, found + again)
    yield _equal(
        "queries of disk, and what host memory had not",
        queries["disk"],
        queries["host"] - hits["host"],
    )


def _check_bytes(counts: Counts, hits: Sequence[Hit], policy: str, sizes: Sizes) -> Iterable[Check]:
    def copied(link: str, direction: str) -> int:
        return counts.value("flexkv_copied_bytes_total", link=link, direction=direction)

    # Copies fail on one rank; the others count what they copied all the same.
    in_vain = _blocks(hits, STORE_FAILURES) * (sizes.engine_block_bytes - sizes.rank_bytes)
    stored = counts.value("flexkv_stored_blocks_total", tier="host") * sizes.block_bytes
    yield _equal("bytes stored, and blocks", copied("device", "store"), stored + in_vain)
    written = counts.value("flexkv_stored_blocks_total", tier="disk") * sizes.block_bytes
    yield _equal("bytes written to disk, and blocks", copied("disk", "write"), written)
    promised = sum(counts.value("flexkv_hit_tokens_total", tier=tier) for tier in _TIERS)
    promised_bytes = promised // sizes.engine_block_tokens * sizes.engine_block_bytes
    loaded = copied("device", "load") + _blocks(hits, LOAD_FAILURES) * sizes.rank_bytes
    if policy == "fail":
        yield _equal("bytes loaded or failed, and hits", loaded, promised_bytes)
    else:
        # Loads begin before all of their blocks are there; what does not come is not loaded.
        yield _at_most("bytes loaded or failed, and hits", loaded, promised_bytes)


def _blocks(hits: Sequence[Hit], kinds: Collection[Kind]) -> int:
    """Engine blocks of the copies that failed so."""
    return sum(hit.blocks for hit in hits if hit.kind in kinds)


def _equal(what: str, seen: int, expected: int) -> Check:
    return Check(what, seen == expected, f"{seen} = {expected}")


def _between(what: str, seen: int, least: int, most: int) -> Check:
    return Check(what, least <= seen <= most, f"{least} <= {seen} <= {most}")


def _at_most(what: str, seen: int, bound: int) -> Check:
    return Check(what, seen <= bound, f"{seen} <= {bound}")


def _at_least(what: str, seen: int, bound: int) -> Check:
    return Check(what, seen >= bound, f"{seen} >= {bound}")


_TIERS = ("host", "disk")
