# SPDX-License-Identifier: Apache-2.0
"""Who takes over the memory of a pool."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from flexkv.service.messages import PoolBlocks
from flexkv.service.pool import PoolMemory, SharedPool
from flexkv.settings import CacheConfig
from flexkv.types.errors import ArenaError
from packages.flexkv.tests.service.served import FORMAT

BLOCKS = PoolBlocks("same", FORMAT.engine_blocks, FORMAT.shard_bytes, 1, ("model: toy",))
SLOTS = 8


@pytest.fixture
def config(tmp_path: Path) -> CacheConfig:
    return CacheConfig(
        runtime_dir=str(tmp_path), cpu_cache_gb=SLOTS * FORMAT.slot_bytes / (1 << 30)
    )


@pytest.fixture
def memory(config: CacheConfig) -> Iterator[PoolMemory]:
    with closing(PoolMemory.create(config, BLOCKS)) as made:
        yield made


def copies(memory: PoolMemory) -> list[int]:
    """Descriptors as an engine has them."""
    return [os.dup(fd) for fd in (memory.arena.fd, memory.index, memory.pages)]


def test_memory_has_one_owner(config: CacheConfig) -> None:
    memory = PoolMemory.create(config, BLOCKS)
    first, second = copies(memory), copies(memory)
    with pytest.raises(ArenaError, match="another service owns the memory"):
        PoolMemory.resume(BLOCKS, SLOTS, first)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(first[0])
    memory.close()
    PoolMemory.resume(BLOCKS, SLOTS, second).close()


def test_memory_of_other_sizes_is_refused(memory: PoolMemory) -> None:
    arena, index, pages = copies(memory)
    with pytest.raises(ArenaError, match=r"memory for 9 slots has \d+ bytes; allowed: \d+"):
        PoolMemory.resume(BLOCKS, SLOTS + 1, [arena, index, pages])
    with pytest.raises(ArenaError, match="memory for 8 slots"):
        PoolMemory.resume(BLOCKS, SLOTS, copies(memory)[::-1])
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(ArenaError, match="not a memory file"):
        PoolMemory.resume(BLOCKS, SLOTS, [*copies(memory)[:1], read, *copies(memory)[2:]])


def test_memory_without_an_index_is_refused(config: CacheConfig, memory: PoolMemory) -> None:
    fds = copies(memory)
    memory.close()
    taken = PoolMemory.resume(BLOCKS, SLOTS, fds)
    with pytest.raises(ValueError, match="no index of layout"):
        SharedPool(config, "toy", BLOCKS, taken, begun=True)
