# SPDX-License-Identifier: Apache-2.0
"""The worker side of an offloading spec: copies the shard of one rank, as vLLM submits it."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from flexkv.engine.boundary import LASTING, ErrorBoundary, always, answers
from flexkv.engine.side_figures import CopyFigures
from flexkv.engine.worker.pages import Device
from flexkv.engine.worker.rank_copies import RankSlots
from flexkv.host.arena import Arena
from flexkv.layout import KVLayout, PlacedPlane
from flexkv.session import Session
from flexkv.types.mover import Direction, Mover, Status
from flexkv_vllm.compat.patches import answer_stats, offloading_connector_of
from flexkv_vllm.offloading.failures import LoadFailures
from flexkv_vllm.offloading.orders import ArenaBlocks
from flexkv_vllm.offloading.stats import connector_stats

logger = logging.getLogger("flexkv.vllm")

_WAIT_SLICE_SECONDS = 1.0
_POLLING = "polling copies"


@dataclass(frozen=True, slots=True)
class GroupMover:
    """The mover of a KV cache group.

    Attributes:
        mover: mover of its pages; groups with the same pages share one.
        block_bytes: bytes from one engine block to the next in a slot.
    """

    mover: Mover
    block_bytes: int


@dataclass(slots=True)
class Job:
    """A job of vLLM's under way.

    Attributes:
        direction: LOAD or STORE.
        cell: where to report on the board; None for nowhere.
        engine_blocks: engine blocks of all groups.
        copies: the movers' tickets, one for each group that has blocks.
        size: bytes to copy.
        failed: whether a copy could not begin.
        errors: how often its copies could not be polled.
    """

    direction: Direction
    cell: int | None
    engine_blocks: list[int]
    copies: list[tuple[Mover, int]] = field(default_factory=list)
    size: int = 0
    failed: bool = False
    errors: int = 0


class FlexKVOffloadingWorker(OffloadingWorker):
    """All that vLLM's connector calls in a worker. One per process; single-threaded.

    Args:
        session: with the arena; owned, closed after the movers.
        groups: one entry for each KV cache group.
        rank: this rank.
        device: the device of the pages.
        boundary: catches errors of single jobs.
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
        self._failures = LoadFailures(len(groups))
        self._figures = CopyFigures(boundary, lambda _: None, self._bytes_by_way)
        self._has_connector = False
        self._jobs: dict[int, Job] = {}
        self._suspended = False

    @answers(lambda self, *job: self._fail(Direction.STORE, *job), "the blocks are not cached")
    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._submit(job_id, Direction.STORE, src_spec, dst_spec)

    @answers(lambda self, *job, **_: self._fail(Direction.LOAD, *job), "the load fails")
    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        return self._submit(job_id, Direction.LOAD, dst_spec, src_spec)

    def get_finished(self) -> list[TransferResult]:
        """Jobs that have ended, failed ones included. Blocks of a failed store are not found; those
        of a failed load are reported to vLLM by `LoadFailures`."""
        ended = []
        for job_id, job in list(self._jobs.items()):
            statuses = self._poll(job)
            if Status.PENDING in statuses:
                continue
            del self._jobs[job_id]
            failed = job.failed or Status.FAILED in statuses
            if job.cell is not None:
                status = Status.FAILED if failed else Status.DONE
                self._arena.board.report(job.cell, self._rank, status)
            if failed and job.direction is Direction.LOAD:
                self._failures.report(job_id, job.engine_blocks)
            size, seconds = 0 if failed else job.size, self._seconds(job)
            if size:
                self._figures.count(job.direction, size, seconds or None)
            ended.append(TransferResult(job_id, True, size, seconds))
        return ended

    @answers(always(None), "copies end, now and for good")
    def wait(self, job_ids: set[int]) -> None:
        """Wait for the end of those jobs that are under way, whose engine blocks will be
        overwritten."""
        with self._boundary.guard("fencing stores", "copies end, now and for good"):
            for job_id in job_ids & self._jobs.keys():
                self._wait_for(self._jobs[job_id])
            return
        self._end_copies()

    @answers(always(None), "copies end, now and for good")
    def suspend(self) -> None:
        """vLLM is about to unmap its KV pages. Returns once no copy touches them; jobs that vLLM
        submits until `resume` fail."""
        self._suspended = True
        self.wait(set(self._jobs))

    @answers(always(None), "nothing is loaded or stored")
    def resume(self) -> None:
        """vLLM has mapped its KV pages again."""
        self._suspended = False

    @answers(always(None), "the kernel cleans up when the process ends")
    def shutdown(self) -> None:
        """End all copies, then leave the session. Idempotent."""
        self._stop_copying()
        self._session.close()

    def _find_connector(self) -> None:
        """Have vLLM's connector report failed loads and figures. vLLM has made it known when the
        first job comes, and asks for reports at the end of that step."""
        if self._has_connector:
            return
        with self._boundary.guard("finding vLLM's connector", "the worker ends if a load fails"):
            connector = offloading_connector_of(self)
            if connector is not None:
                self._failures.listen(connector)
                answer_stats(connector, self._take_stats)
                self._has_connector = True

    def _take_stats(self) -> OffloadingConnectorStats | None:
        if self._figures.active or self._boundary.failures:
            with self._boundary.guard("counting", "the counts come later, or are lost"):
                return connector_stats(self._figures.take())
        return None

    def _bytes_by_way(self) -> Mapping[str, int]:
        total: Counter[str] = Counter()
        for mover in {id(group.mover): group.mover for group in self._groups}.values():
            total.update(mover.bytes_by_way())
        return total

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
        self, job_id: int, direction: Direction, pages: GPULoadStoreSpec, blocks: LoadStoreSpec
    ) -> bool:
        assert isinstance(blocks, ArenaBlocks)
        self._find_connector()
        refused = self._suspended or blocks.cell is None
        job = Job(direction, blocks.cell, pages.block_ids.tolist(), failed=refused)
        self._jobs[job_id] = job
        if job.failed:
            return True
        with self._boundary.guard(f"{direction.name.lower()} of blocks", "they count as a miss"):
            self._copy(job, pages, blocks.slots)
            return True
        job.failed = True  # once what was begun of it has ended
        return True

    def _fail(self, direction: Direction, job_id: int, source: Any, target: Any) -> bool:
        """After an error in `_submit`: the job ends as failed."""
        stores = direction is Direction.STORE
        pages, blocks = (source, target) if stores else (target, source)
        job = Job(direction, blocks.cell, pages.block_ids.tolist(), failed=True)
        self._jobs.setdefault(job_id, job).failed = True
        return True

    def _copy(self, job: Job, pages: GPULoadStoreSpec, slots: Sequence[int]) -> None:
        """Start the copies of a job behind the engine's work so far: the forward pass that computes
        the blocks to store, or work that may still read the blocks to fill.

        Raises:
            ValueError: vLLM's blocks do not match the slots; nothing is copied then.
        """
        after = self._device.work_so_far()
        for group, blocks, offsets in self._plan(job, pages, slots):
            # In one statement: no error may lose a copy that has begun.
            job.copies.append(
                (group.mover, group.mover.submit(job.direction, blocks, offsets, after))
            )
            job.size += len(blocks) * group.block_bytes

    def _plan(
        self, job: Job, pages: GPULoadStoreSpec, slots: Sequence[int]
    ) -> list[tuple[GroupMover, array[int], array[int]]]:
        """For each group with blocks: its engine blocks, and the place of each in the arena.

        vLLM lists the engine blocks of a group in a row, from a given place of the request on. A
        slot has as many as a chunk.
        """
        plan = []
        block_at = slot_at = 0
        sizes = zip(self._groups, pages.group_sizes, pages.block_indices, strict=True)
        for group, size, index in sizes:
            if size == 0:
                continue
            skip = index % self._chunk
            if job.direction is Direction.STORE and (skip or size % self._chunk):
                raise ValueError(f"{size} engine blocks from {index} on do not fill whole blocks")
            blocks = array("Q", job.engine_blocks[block_at : block_at + size])
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
