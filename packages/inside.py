# SPDX-License-Identifier: Apache-2.0
"""Private parts of FlexKV that tests look at or replace, each named in this file only."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from flexkv.cache import KVCache
from flexkv.client import FetchId
from flexkv.engine.epoch_cache import EpochCache
from flexkv.figures.definitions import TierReading
from flexkv.host.arena import Arena
from flexkv.host.board import CELLS, CompletionBoard
from flexkv.index.block_index import BlockIndex, IndexReader
from flexkv.service.engine_page import EnginePage
from flexkv.service.line import Line
from flexkv.service.served_cache import ServedCache
from flexkv.service.served_stores import ServedStores
from flexkv.service.server import NodeServer
from flexkv.tiers.link import Link
from flexkv.transfer.copies import DeviceCopy
from flexkv.transfer.tier_stack import TierStack
from packages.tier_blocks import ready_blocks, writing_blocks


def index_of(cache: KVCache) -> BlockIndex:
    """The blocks in host memory."""
    return cache._index


def is_making(server: NodeServer) -> bool:
    """Whether a pool is being made."""
    return bool(server._maker._making)


def below_of(cache: KVCache) -> TierStack:
    """The tiers below host memory, and what moves blocks from and to them."""
    return cache._below


def tier_figures(cache: KVCache) -> list[TierReading]:
    """The figures and counts of each lower tier."""
    return cache._below.figures(cache.info.slot_bytes)


def demoters_of(cache: KVCache) -> Sequence[Any]:
    """What writes to each lower tier, the fastest tier first."""
    return cache._below._demoters


def demoting(demoter: Any) -> Collection[bytes]:
    """Keys of the blocks that are being written to a tier, or wait for that."""
    held: Collection[bytes] = demoter._held
    return held


def described(events: Any) -> set[bytes]:
    """Keys of the blocks in host memory whose fields KV events have."""
    keys: set[bytes] = set(events._described) - events._lost.keys()
    return keys


def leaving_of(cache: KVCache) -> Any:
    """Blocks that lower tiers take before the arena gives their slots away."""
    return cache._below._writeback._leaving


def board_of(cache: KVCache) -> CompletionBoard:
    """Where ranks report the ends of transfers."""
    return cache._device._board


def copies_of(cache: KVCache) -> Sequence[DeviceCopy[Any]]:
    """The loads and stores under way, in the order of their ids."""
    return list(cache._device._pending.values())


def cache_of(side: Any) -> Any:
    """The cache of a rank of SGLang that decides."""
    return side._cache


def free_cells(board: CompletionBoard) -> Sequence[int]:
    """Cells that no transfer has."""
    return board._free


def store_of(drive: Any) -> Any:
    """The file of a drive's blocks, or the store of a remote tier: tests replace its calls."""
    return drive._store


def requests_of(blocks: Any) -> Any:
    """Requests to an object store: tests replace its calls."""
    return blocks._requests


def questions_of(tier: Any) -> Any:
    """Queries of a remote tier."""
    return tier._questions


def link_of(owner: Any) -> Link:
    """The threads that do a tier's jobs, or put its queries to a store."""
    link: Link = owner._link
    return link


def is_idle(link: Link) -> bool:
    """Whether no job runs or waits; those that hang do not count."""
    return not (link._running or link._queue)


def hung_jobs(link: Link) -> int:
    return len(link._hung)


def chooser_of(side: Any) -> Any:
    """What decides whether a scheduler's loads are worth their time."""
    return side._chooser


def lose_track(side: Any) -> None:
    """As after an error while a scheduler's side looked at a step."""
    side._lose_track()


def accesses_of(side: Any) -> Any:
    """The steps that last used each block; None where loads follow every step."""
    return side._accesses and side._accesses._uses


def fetches_of(side: Any) -> tuple[Any, Any]:
    """The cache of an SGLang rank that decides, and the fetches of its requests."""
    return side._cache, side.requests.waiting.awaited


def blocks_of_fetch(cache: KVCache, fetch: FetchId) -> list[Any]:
    """The blocks of a fetch by position, None for those that it lacks; none if it has ended."""
    found = cache._below.fetcher._fetches.get(fetch)
    return [] if found is None else found.blocks


def assert_no_read(cache: KVCache) -> None:
    """Nothing is read from a lower tier, and no fetch waits for a slot."""
    fetcher = cache._below.fetcher
    reads = fetcher.reads
    assert not reads
    assert not reads.by_key
    assert not reads._delivered
    assert not fetcher._waiting


def open_fetches(cache: KVCache) -> Collection[FetchId]:
    """The requests that wait for lower tiers."""
    return cache._below.fetcher._fetches.keys()


def assert_no_fetch(cache: KVCache) -> None:
    """No request waits for a lower tier."""
    fetcher = cache._below.fetcher
    assert not fetcher._fetches
    assert not fetcher._waiting


def assert_no_write(cache: KVCache) -> None:
    """Nothing waits for its write to a lower tier, or is written."""
    assert not cache._below._writeback._leaving
    for demoter in cache._below._demoters:
        assert not any((demoter._held, demoter._writing, demoter.writes, demoter._waiting))
        assert not demoter._chain


def assert_no_lease(cache: KVCache) -> None:
    """No block is leased or being written."""
    assert not writing_blocks(cache._index)
    assert [b.key for b in ready_blocks(cache._index).values() if b.leases] == []


def announced(cache: Any) -> set[bytes]:
    """The blocks of a pool that engines have announced."""
    return set(cache.fetcher._announced)


def stores_of(cache: ServedCache) -> ServedStores:
    """The stores of an engine that uses the node's service, and its granted slots."""
    return cache._stores


def awaits_service(cache: ServedCache) -> bool:
    """Whether the service has stores to publish, and lives."""
    return cache._stores.awaits_answer and not cache._hangs and not cache._line.is_cut


def memory_of(cache: ServedCache, arena: Arena) -> list[int]:
    """Descriptors of the memory that an engine hands to a service."""
    return [arena.fd, *cache._attached._fds]


def page_of(cache: ServedCache) -> EnginePage:
    """What an engine writes for the service."""
    return cache._attached.page


def line_of(cache: ServedCache) -> Line:
    """The line of an engine to the node's service."""
    return cache._line


def reader_of(cache: ServedCache) -> IndexReader:
    """What reads the index of the node's service, and holds its blocks."""
    return cache._reader


def new_connection(cache: ServedCache) -> Any:
    """The connection of an engine that has attached again, while its cache does not know it yet."""
    return next(iter(cache._reattachment._made), None)


def waiting_messages(line: Line) -> Sequence[Any]:
    """Messages that wait to be sent and are in no packet yet."""
    return line._messages


def waiting_packets(line: Line) -> deque[bytes]:
    """Packets that wait to be sent: tests add others."""
    return line._packets


def bell_of(line: Line) -> memoryview:
    """How many packets the service has sent, and how many the engine has read."""
    return line._bell


def shared_of(cache: EpochCache) -> Any:
    """The cache that engines share, below the keys of one of them."""
    return cache._cache


def assert_served_rest(cache: ServedCache) -> None:
    """An engine that uses the node's service moves no block, and has each granted slot free."""
    assert sorted(free_cells(cache._device._board)) == list(range(CELLS))
    assert reader_of(cache).held == 0
    stores = stores_of(cache)
    assert not any((stores.by_id, stores.keys, stores.awaits_answer, cache._tiers._fetches))
    assert sorted(stores.free) == sorted(stores.granted)
