# SPDX-License-Identifier: Apache-2.0
"""What moves blocks between memory and files: FlexKV's disk tier and vLLM's file-system tier.

Both take the same blocks in the same batches, a batch as one request has it, and are driven as a
scheduler drives them: in each of its steps it submits a batch, if there is one, and polls.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from flexkv.tiers.disk import Drive, open_disk_tier
from flexkv.tiers.job import Outcome, Priority

Direction = Literal["write", "read"]
BATCH_BYTES = 32 << 20
KEY_BYTES = 32
STEP_SECONDS = 0.0002
FINGERPRINT = "f" * 64


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that were moved in one direction, in how long, with how much processor time."""

    size: int
    seconds: float
    cpu_seconds: float

    @property
    def gb_per_s(self) -> float:
        return self.size / self.seconds / 1e9

    @property
    def cpu_seconds_per_gb(self) -> float:
        return self.cpu_seconds / self.size * 1e9


class Reader(Protocol):
    """Something that reads blocks."""

    @property
    def name(self) -> str: ...

    @property
    def how(self) -> str:
        """How it uses files, in words."""
        ...

    def read(self) -> Transfer: ...


class Contender(Reader, Protocol):
    """Something that moves blocks both ways. `read` gives back what the last `write` wrote."""

    def write(self) -> Transfer: ...

    def close(self) -> None: ...


def random_memory(size: int) -> mmap.mmap:
    """`size` bytes of memory, a multiple of 4 KiB and aligned to it, full of random bytes.

    In huge pages where the system has them: how many pieces a block has in physical memory is
    otherwise chance, and a virtual disk's bandwidth depends on it by a factor of three.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    while memory.tell() < size:
        memory.write(os.urandom(min(16 << 20, size - memory.tell())))
    return memory


def blocks_of(memory: mmap.mmap, block_bytes: int) -> list[memoryview]:
    """`memory` as blocks."""
    view = memoryview(memory)
    return [view[start : start + block_bytes] for start in range(0, len(view), block_bytes)]


class FlexKV:
    """The disk tier behind `LowerTier`, checksums on."""

    name = "FlexKV"
    how = "O_DIRECT, slots written over"

    def __init__(self, folder: Path, memory: mmap.mmap, block_bytes: int) -> None:
        self._blocks = blocks_of(memory, block_bytes)
        self._keys: list[bytes] = []
        # As many slots as blocks, and few more: the table also takes its part.
        capacity = len(memory) + len(memory) // 64 + 2 * block_bytes
        self._tier = open_disk_tier([str(folder)], FINGERPRINT, block_bytes, capacity)
        # Each slot was written before: a full cache overwrites.
        self.write()
        self.write()

    def write(self) -> Transfer:
        self._keys = [os.urandom(KEY_BYTES) for _ in self._blocks]
        return self._timed(self._tier.write)

    def read(self) -> Transfer:
        return self._timed(lambda keys, blocks: self._tier.read(keys, blocks, Priority.LOAD))

    @property
    def drives(self) -> Sequence[Drive]:
        return self._tier.drives

    def placed(self) -> Iterator[tuple[int, memoryview]]:
        """The slot and the memory of each block that was written last, in order."""
        (drive,) = self.drives
        for key, block in zip(self._keys, self._blocks, strict=True):
            slot = drive.index.lease(key)
            if slot is None:
                raise RuntimeError("the disk tier has lost a block")
            drive.index.release(slot)
            yield slot, block

    def close(self) -> None:
        self._tier.close()

    def _timed(self, submit: Callable[[Sequence[bytes], Sequence[memoryview]], int]) -> Transfer:
        def settle() -> int:
            results = self._tier.poll()
            for result in results:
                if result.outcome is not Outcome.DONE:
                    raise RuntimeError(f"the disk tier ended a block with {result.outcome}")
            return len(results)

        return _drive(
            self._blocks,
            submit=lambda batch: submit(self._keys[batch], self._blocks[batch]),
            settle=settle,
            expected=len(self._blocks),
        )


class VllmFiles:
    """vLLM's file-system tier with its defaults, as `TieringOffloadingSpec` makes and drives it:
    one file a block, kept for ever, 16 + 16 threads, a batch is one task of one thread.

    Attributes:
        keys: of the blocks in memory, which `read` reads.
    """

    name = "vLLM"

    def __init__(self, folder: Path, memory: mmap.mmap, block_bytes: int) -> None:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
        from vllm.v1.kv_offload.tiering.fs.io import probe_o_direct

        self._folder = folder
        self._blocks = blocks_of(memory, block_bytes)
        self.keys: list[Any] = []
        self._jobs = itertools.count(1)
        self._request = ReqContext("bench")
        folder.mkdir(exist_ok=True)
        self._direct: bool = probe_o_direct(str(folder))
        caching = "O_DIRECT" if self._direct else "buffered, evicted from page cache before reads"
        self.how = f"{caching}, a new file for each block"
        view = memoryview(memory).cast("B", (len(self._blocks), block_bytes))
        self._tier: Any = SecondaryTierFactory.create_secondary_tier(
            {"type": "fs", "root_dir": str(folder)}, view, _spec(block_bytes, len(memory))
        )

    def write(self) -> Transfer:
        from vllm.v1.kv_offload.base import make_offload_key

        self.keys = [make_offload_key(os.urandom(KEY_BYTES), 0) for _ in self._blocks]
        done = self._timed(self._tier.submit_store, is_promotion=False)
        if not self._direct:
            self._leave_page_cache()
        return done

    def read(self) -> Transfer:
        return self._timed(self._tier.submit_load, is_promotion=True)

    def close(self) -> None:
        self._tier.shutdown()

    def _timed(self, submit: Callable[[Any], None], is_promotion: bool) -> Transfer:
        import numpy as np
        from vllm.v1.kv_offload.tiering.base import TransferJob

        def job(batch: slice) -> Any:
            chunks = np.arange(batch.start, batch.stop)
            keys = self.keys[batch]
            return TransferJob(next(self._jobs), keys, chunks, is_promotion, self._request)

        def settle() -> int:
            results = list(self._tier.get_finished_jobs())
            if not all(result.success for result in results):
                raise RuntimeError("vLLM's file-system tier could not move a block")
            return len(results)

        return _drive(
            self._blocks,
            submit=lambda batch: submit(job(batch)),
            settle=settle,
            expected=len(_batches(self._blocks)),
        )

    def _leave_page_cache(self) -> None:
        for path in self._folder.rglob("*.bin"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _drive(
    blocks: Sequence[memoryview],
    submit: Callable[[slice], object],
    settle: Callable[[], int],
    expected: int,
) -> Transfer:
    """Submit `blocks`, one batch a step, until `settle` has counted `expected` results."""
    began, cpu_began = time.perf_counter(), time.process_time()
    for batch in _batches(blocks):
        submit(batch)
        expected -= settle()
        time.sleep(STEP_SECONDS)
    while expected:
        expected -= settle()
        time.sleep(STEP_SECONDS)
    return Transfer(
        size=len(blocks) * len(blocks[0]),
        seconds=time.perf_counter() - began,
        cpu_seconds=time.process_time() - cpu_began,
    )


def _batches(blocks: Sequence[memoryview]) -> list[slice]:
    """The blocks of one request after the other."""
    step = max(1, BATCH_BYTES // len(blocks[0]))
    return [slice(start, min(start + step, len(blocks))) for start in range(0, len(blocks), step)]


def _spec(block_bytes: int, cpu_bytes: int) -> Any:
    """The spec of an engine with one KV cache group, one worker and blocks of `block_bytes`."""
    from vllm.v1.kv_offload import config
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    return TieringOffloadingSpec(
        config.OffloadingConfig(
            groups=(config.OffloadingGroupConfig(16, ("layer",), 0),),
            worker_kv_bytes_per_block=block_bytes,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": cpu_bytes},
            engine_id="bench",
            model=config.OffloadingModelConfig("bench", "bfloat16"),
            cache=config.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=config.OffloadingParallelConfig(
                rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1,
                data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None,
                is_parallelism_agnostic=False,
            ),
        )
    )  # fmt: skip
