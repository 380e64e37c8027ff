# SPDX-License-Identifier: Apache-2.0
"""The worker side of an offloading spec: copies the shard of one rank, as vLLM submits it."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from flexkv.engine.boundary import LASTING, ErrorBoundary, always, answers
from flexkv.engine.worker.pages import Device
from flexkv.engine.worker.rank_copies import RankSlots
from flexkv.host.arena import Arena
from flexkv.layout import KVLayout, PlacedPlane
from flexkv.session import Session
from flexkv.types.mover import Direction, Mover, Status
from flexkv_vllm.offloading.manager import ArenaBlocks

logger = logging.getLogger("flexkv.vllm")

_WAIT_SLICE_SECONDS = 1.0
_POLLING = "polling copies"
_TRIES = 2
"""How often a failed load begins again. The blocks stay in host memory meanwhile."""


@dataclass(frozen=True, slots=True)
class GroupMover:
    """The mover of a KV cache group, which groups with the same pages share. `block_bytes`: bytes
    from one engine block to the next in a slot."""

    mover: Mover
    block_bytes: int


@dataclass(slots=True)
class Job:
    """A job of vLLM's under way.

    Attributes:
        pages, blocks: vLLM's end of it, and FlexKV's.
        tries: how often its copies may begin again, after they have failed.
        copies: the movers' tickets, one for each group that has blocks.
        size: bytes to copy.
        failed: whether a copy could not begin.
        errors: how often its copies could not be polled.
    """

    direction: Direction
    pages: GPULoadStoreSpec
    blocks: ArenaBlocks
    tries: int = 0
    copies: list[tuple[Mover, int]] = field(default_factory=list)
    size: int = 0
    failed: bool = False
    errors: int = 0


class FlexKVOffloadingWorker(OffloadingWorker):
    """All that vLLM's connector calls in a worker. One per process; single-threaded.

    Args:
        session: with the arena; owned, closed after the movers.
        groups: one entry for each KV cache group.
    """

    def __init__(
        self,
        session: Session,
        groups: Sequence[GroupMover],
        rank: int,
        device: Device,
        boundary: ErrorBoundary,
    ) -> None:
        self._session = session
        self._arena = session.arena
        self._groups = groups
        self._rank = rank
        self._chunk = session.arena.spec.format.engine_blocks
        self._device = device
        self._boundary = boundary
        self._jobs: dict[int, Job] = {}
        self._suspended = False

    @answers(lambda self, *job: self._fail(Direction.STORE, *job), "the blocks are not cached")
    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._submit(job_id, Direction.STORE, src_spec, dst_spec, tries=0)

    @answers(lambda self, *job, **_: self._fail(Direction.LOAD, *job), "the load fails")
    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        # vLLM computes on an expedited load in this step, before it asks how the load has ended.
        tries = 0 if expedited else _TRIES
        return self._submit(job_id, Direction.LOAD, dst_spec, src_spec, tries=tries)

    def get_finished(self) -> list[TransferResult]:
        """Jobs that have ended. vLLM has no answer to a failed load and ends: no token is computed
        over missing bytes. The blocks of a failed store are not found, which vLLM need not know."""
        ended = []
        for job_id, job in list(self._jobs.items()):
            statuses = self._poll(job)
            if Status.PENDING in statuses:
                continue
            failed = job.failed or Status.FAILED in statuses
            if failed and job.tries:
                if not self._suspended:
                    job.tries -= 1
                    self._begin(job)
                continue
            del self._jobs[job_id]
            if job.blocks.cell is not None:
                status = Status.FAILED if failed else Status.DONE
                self._arena.board.report(job.blocks.cell, self._rank, status)
            loads = job.direction is Direction.LOAD
            if failed and loads:
                logger.error(
                    "a load of %d blocks failed, which vLLM's OffloadingConnector cannot compute "
                    "instead: vLLM ends. FlexKVConnectorV1 computes what could not be loaded",
                    len(job.pages.block_ids),
                )
            size, seconds = 0 if failed else job.size, self._seconds(job)
            ended.append(TransferResult(job_id, not (failed and loads), size, seconds))
        return ended

    @answers(always(None), "copies end, now and for good")
    def wait(self, job_ids: set[int]) -> None:
        """Wait for the end of those jobs that are under way, whose engine blocks will be
        overwritten."""
        for _ in range(2):  # without copies, the next load would end the engine
            with self._boundary.guard("fencing stores", "copies end if a second try fails, too"):
                for job_id in job_ids & self._jobs.keys():
                    self._wait_for(self._jobs[job_id])
                return
        self._end_copies()

    @answers(always(None), "copies end, now and for good")
    def unregister_kv_caches(self) -> None:
        """vLLM is about to unmap its KV pages. Returns once no copy touches them; jobs that vLLM
        submits until `restore_kv_caches` fail."""
        self._suspended = True
        self.wait(set(self._jobs))

    @answers(always(None), "nothing is loaded or stored")
    def restore_kv_caches(self) -> None:
        """vLLM has mapped its KV pages again."""
        self._suspended = False

    @answers(always(None), "the kernel cleans up when the process ends")
    def shutdown(self) -> None:
        """End all copies, then leave the session. Idempotent."""
        self._stop_copying()
        self._session.close()

    def _wait_for(self, job: Job) -> None:
        for mover, ticket in job.copies:
            while mover.wait(ticket, _WAIT_SLICE_SECONDS) is Status.PENDING:
                logger.warning("still waiting for a copy from blocks that vLLM reuses")

    def _end_copies(self) -> None:
        """End all copies for good, and have no more offered."""
        self._arena.board.stop(self._rank)
        self._stop_copying()

    def _stop_copying(self) -> None:
        for group in self._groups:
            group.mover.close()

    def _poll(self, job: Job) -> list[Status]:
        """The status of each copy of a job."""
        with self._boundary.guard(_POLLING, "they are polled in the next step"):
            return [mover.poll(ticket) for mover, ticket in job.copies]
        job.errors += 1
        if job.errors < LASTING:
            return [Status.PENDING]
        self._boundary.gave_up(_POLLING, "all loads and stores of this rank fail")
        self._end_copies()
        return [Status.FAILED]

    def _seconds(self, job: Job) -> float:
        """What the copies of a job took."""
        with self._boundary.guard("timing copies", "they count as no time"):
            return sum(mover.copy_seconds(ticket) or 0.0 for mover, ticket in job.copies)
        return 0.0

    def _submit(
        self,
        job_id: int,
        direction: Direction,
        pages: GPULoadStoreSpec,
        blocks: LoadStoreSpec,
        *,
        tries: int,
    ) -> bool:
        assert isinstance(blocks, ArenaBlocks)
        refused = self._suspended or blocks.cell is None
        job = Job(direction, pages, blocks, 0 if refused else tries, failed=refused)
        self._jobs[job_id] = job
        if not refused:
            self._begin(job)
        return True

    def _fail(self, direction: Direction, job_id: int, source: Any, target: Any) -> bool:
        """After an error in `_submit`: the job ends as failed."""
        stores = direction is Direction.STORE
        pages, blocks = (source, target) if stores else (target, source)
        job = self._jobs.setdefault(job_id, Job(direction, pages, blocks))
        job.failed = True
        return True

    def _begin(self, job: Job) -> None:
        """Begin its copies. If one fails, the job has failed once those that have begun end."""
        job.copies, job.size, job.failed = [], 0, True
        with self._boundary.guard(f"{job.direction.name.lower()} of blocks", "it fails"):
            self._copy(job)
            job.failed = False

    def _copy(self, job: Job) -> None:
        """Start the copies of a job behind the engine's work so far: the forward pass that computes
        the blocks to store, or work that may still read the blocks to fill. Raises ValueError if
        vLLM's blocks do not match the slots; nothing is copied then."""
        after = self._device.work_so_far()
        for group, blocks, offsets in self._plan(job):
            # In one statement: no error may lose a copy that has begun.
            job.copies.append(
                (group.mover, group.mover.submit(job.direction, blocks, offsets, after))
            )
            job.size += len(blocks) * group.block_bytes

    def _plan(self, job: Job) -> list[tuple[GroupMover, array[int], array[int]]]:
        """For each group with blocks: its engine blocks, and the place of each in the arena.

        vLLM lists the engine blocks of a group in a row, from a given place of the request on. A
        slot has as many as a chunk.
        """
        plan = []
        pages, slots = job.pages, job.blocks.slots
        engine_blocks = pages.block_ids.tolist()
        block_at = slot_at = 0
        sizes = zip(self._groups, pages.group_sizes, pages.block_indices, strict=True)
        for group, size, index in sizes:
            if size == 0:
                continue
            skip = index % self._chunk
            if job.direction is Direction.STORE and (skip or size % self._chunk):
                raise ValueError(f"{size} engine blocks from {index} on do not fill whole blocks")
            blocks = array("Q", engine_blocks[block_at : block_at + size])
            count = -(-(skip + size) // self._chunk)
            place = RankSlots(self._arena, self._rank, group.block_bytes)
            offsets = place.offsets(slots[slot_at : slot_at + count], skip, size)
            plan.append((group, blocks, offsets))
            block_at += size
            slot_at += count
        if slot_at != len(slots):
            raise ValueError(f"vLLM's blocks fill {slot_at} slots, but there are {len(slots)}")
        return plan


def start_movers(
    device: Device, layouts: Sequence[KVLayout], chunk: int, arena: Arena, threads: int
) -> list[GroupMover]:
    """A mover for each group; groups that have the same pages share one."""
    movers: dict[tuple[PlacedPlane, ...], GroupMover] = {}
    groups = []
    for layout in layouts:
        planes = tuple(layout.place(chunk))
        if planes not in movers:
            stored = range(len(planes))
            mover = device.make_mover(planes, stored, layout.num_blocks, arena, threads)
            movers[planes] = GroupMover(mover, layout.head_bytes)
        groups.append(movers[planes])
    return groups
