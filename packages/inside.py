# SPDX-License-Identifier: Apache-2.0
"""Private parts of FlexKV that tests look at or replace, each named in this file only; those of the
tiers are in `inside_tiers.py`, and those of the sides in engines in `inside_adapters.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from flexkv.cache import KVCache
from flexkv.client import FetchId, Reset
from flexkv.engine.worker.worker import WorkerSide
from flexkv.figures.definitions import TierReading
from flexkv.host.arena import Arena
from flexkv.host.board import CELLS, CompletionBoard
from flexkv.index.block_index import BlockIndex, IndexReader
from flexkv.service.line import Line
from flexkv.service.page import EnginePage
from flexkv.service.served_cache import ServedCache
from flexkv.service.served_stores import ServedStores
from flexkv.service.server import NodeServer
from flexkv.tiers.job import Urgency
from flexkv.transfer.copies import DeviceCopy
from flexkv.transfer.stack import TierStack
from flexkv.types.changes import Medium
from packages.inside_tiers import assert_idle
from packages.tier_blocks import ready_blocks, writing_blocks


def index_of(cache: KVCache) -> BlockIndex:
    """The blocks in host memory."""
    return cache._index


def fail_resets(patch: pytest.MonkeyPatch, cache: Any, kind: Reset, error: Exception) -> None:
    """Let each reset of a kind raise instead."""
    reset = cache.reset

    def fail(asked: Reset, *args: Any) -> None:
        if asked is kind:
            raise error
        reset(asked, *args)

    patch.setattr(cache, "reset", fail)


def announced_keys(pool: Any) -> Any:
    """Keys of the blocks that engines announce to the node's service."""
    return pool.announced._keys


def tier_keys(pool: Any) -> Any:
    """Keys of the blocks that are below the host memory of a node."""
    return pool.below._keys


def pools_of(server: NodeServer) -> Sequence[Any]:
    return list(server._pools)


def promised_slots(engine: Any) -> int:
    """The slots that the node's service gives an engine ahead of its stores."""
    slots: int = engine._target
    return slots


def go_on(server: NodeServer) -> None:
    """Let a server that was stopped run again."""
    server._stops = False


def turn_of_server() -> Callable[[NodeServer, float], bool]:
    """A turn of a service's loop, without what replaces it."""
    return NodeServer._turn


def end_of_server() -> Callable[..., None]:
    """What a service does about the end of a process, without what replaces it."""
    return NodeServer._ended


def is_making(server: NodeServer) -> bool:
    """Whether a pool is being made."""
    return bool(server._making)


def waiting_newcomers(server: NodeServer) -> int:
    """How many processes wait to be let in."""
    return len(server._lobby._waiting)


def below_of(cache: KVCache) -> TierStack:
    """The tiers below host memory, and what moves blocks from and to them."""
    return cache._below


def tier_figures(cache: KVCache) -> list[TierReading]:
    """The figures and counts of each lower tier."""
    return cache._below.figures(cache.info.slot_bytes)


def demoters_of(cache: KVCache) -> Sequence[Any]:
    """What writes to each lower tier, the fastest tier first."""
    return cache._below._demoters


def sources_of(cache: KVCache) -> Sequence[Any]:
    """What reads from each lower tier, the fastest tier first."""
    return cache._below._sources


def is_recovering(cache: KVCache) -> bool:
    """Whether a cache still cleans up after an error."""
    return bool(cache._recovering)


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
    return list(cache._device.unreported.values())


def block_bytes_of(cache: KVCache) -> int:
    """What a load copies for each block."""
    return cache._block_bytes


def arena_of(worker: WorkerSide) -> Arena:
    """The host memory that a worker shares with others."""
    return worker.session.arena


def cache_of(side: Any) -> Any:
    """The cache of a scheduler's side, of a manager, or of a rank of SGLang that decides."""
    return side._cache


def free_cells(board: CompletionBoard) -> Sequence[int]:
    """Cells that no transfer has."""
    return board._free


def chooser_of(side: Any) -> Any:
    """What decides whether a scheduler's loads are worth their time."""
    return side._chooser


def prefill_of(chooser: Any) -> Any:
    """What is known of how long steps take."""
    return chooser._prefill


def timed_steps(chooser: Any) -> Collection[int]:
    """Steps that have begun and not ended."""
    steps: Collection[int] = chooser.timer._steps
    return steps


def is_doubtful(chooser: Any, medium: Medium) -> bool:
    """Whether the last waits for a tier were in vain."""
    doubtful: bool = chooser._waits._paces[medium].doubtful
    return doubtful


def set_step_clock(chooser: Any, clock: Callable[[], float]) -> None:
    """Steps are timed by another clock."""
    chooser.timer._clock = clock


def believe_rate(chooser: Any, rate: float) -> None:
    """Nothing was measured but loads of so many bytes a second."""
    chooser._device._rates.clear()
    chooser.loaded(rate)


def compute_on_device(chooser: Any) -> None:
    """Steps and copies do not share the processor's cores."""
    chooser._on_cores = False


def await_writer(recorder: Any, seconds: float) -> None:
    """Wait until the thread that writes a trace has ended."""
    recorder._thread.join(seconds)


def arrived_shards(server: Any) -> int:
    """Ranks that have told a session's server of their shard."""
    return len(server._shards)


def waiting_schedulers(server: Any) -> int:
    """Schedulers that wait for a session's arena."""
    return len(server._waiting)


def end_reservation(reservation: Any) -> None:
    """As if the reservation's process had been killed."""
    reservation._file.leave_to_parent()


def kept_ends(pins: Any) -> int:
    """Ends of pins that are kept, of pins that are gone, too."""
    return len(pins._ends)


def assert_no_pin(pins: Any) -> None:
    assert pins._pins == {}


def damage_pins(pins: Any) -> None:
    """As after an error in the middle of a call: the ends are lost, and the count is wrong."""
    pins._ends.clear()
    pins._count = 7


def lose_track(side: Any) -> None:
    """As after an error while a scheduler's side looked at a step."""
    side._lose_track()


def accesses_of(side: Any) -> Any:
    """The steps that last used each block; None where loads follow every step."""
    return side._accesses and side._accesses._uses


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


def urgencies_of(cache: KVCache) -> list[Urgency]:
    """The urgency of each request that waits for lower tiers."""
    return [fetch.urgency for fetch in cache._below.fetcher._fetches.values()]


def assert_no_fetch(cache: KVCache) -> None:
    """No request waits for a lower tier."""
    fetcher = cache._below.fetcher
    assert not fetcher._fetches
    assert not fetcher._waiting


def assert_no_write(cache: KVCache) -> None:
    """Nothing waits for its write to a lower tier, or is written."""
    assert not cache._below._writeback._leaving
    for demoter in cache._below._demoters:
        assert_idle(demoter)


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
    return cache._stores.awaits_answer and not cache.status.is_silent and not cache._line.is_cut


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


def assert_served_rest(cache: ServedCache) -> None:
    """An engine that uses the node's service moves no block, and has each granted slot free."""
    assert sorted(free_cells(cache._device._board)) == list(range(CELLS))
    assert reader_of(cache).held == 0
    stores = stores_of(cache)
    assert not any((stores.by_id, stores.keys, stores.awaits_answer, cache._tiers._fetches))
    assert sorted(stores.free) == sorted(stores.granted)
