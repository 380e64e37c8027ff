# SPDX-License-Identifier: Apache-2.0
"""Tries a device's copies on random bytes. A way that does not return them unchanged is not used.

The sizes below are those of the trial.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

from flexkv.types.mover import Direction, Status
from flexkv_kernels.cuda_mover import CudaMover
from flexkv_kernels.cuda_options import CudaMode
from flexkv_kernels.cuda_scratch import Scratch
from flexkv_kernels.native_mover import PlaneTuple

ROW_BYTES = 256
"""A token's K of one head of 128 numbers in bfloat16: about the shortest runs in practice."""

ROWS, HEADS, LAYERS = 16, 8, 8
BLOCKS = 3
BLOCK_BYTES = ROW_BYTES * ROWS * HEADS * LAYERS
CHECK_BYTES = BLOCKS * BLOCK_BYTES
"""Bytes of the arena and of the pages that a trial needs."""

_RING_BYTES = 8 << 20
"""Bytes of the ring of a direction."""

_SECONDS = 10.0
"""Time limit for one copy, which takes milliseconds at most. Not tuned."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a trial. A way in neither has not been possible, for instance without memory
    for a ring.

    Attributes:
        correct: the ways that have returned all bytes.
        wrong: those that have returned other bytes.
    """

    correct: tuple[CudaMode, ...]
    wrong: tuple[CudaMode, ...]


def check_modes(scratch: Scratch, modes: Sequence[CudaMode]) -> Checked:
    """Find the ways that copy correctly in both directions.

    Each way is tried against DMA: it loads blocks that DMA stores, and stores blocks that DMA
    loads. The pages have the heads of a token side by side, so that each row is copied by itself.
    Raises RuntimeError if a copy fails; ValueError if there can be no mover on this device.

    Args:
        scratch: memory whose arena and pages have at least `CHECK_BYTES` each.
        modes: the ways to try.
    """
    correct: list[CudaMode] = []
    wrong: list[CudaMode] = []
    with closing(scratch.open_mover(_planes(scratch), BLOCKS, _RING_BYTES)) as mover:
        for mode in modes:
            if mode is CudaMode.STAGED and not mover.ring_bytes:
                continue
            fallback = mover.bytes_by_mode()[CudaMode.AUTO]
            came_back = [
                _comes_back(scratch, mover, *pair)
                for pair in ((mode, CudaMode.DMA), (CudaMode.DMA, mode))
            ]
            if mover.bytes_by_mode()[CudaMode.AUTO] == fallback:
                (correct if all(came_back) else wrong).append(mode)
    return Checked(tuple(correct), tuple(wrong))


def _planes(scratch: Scratch) -> list[PlaneTuple]:
    page = ROWS * ROW_BYTES
    planes: list[PlaneTuple] = []
    for head in range(HEADS):
        for layer in range(LAYERS):
            base = scratch.pages + layer * BLOCKS * HEADS * page + head * ROW_BYTES
            place = (head * LAYERS + layer) * page
            planes.append((base, HEADS * page, ROWS, HEADS * ROW_BYTES, ROW_BYTES, place))
    return planes


def _comes_back(scratch: Scratch, mover: CudaMover, load: CudaMode, store: CudaMode) -> bool:
    """Whether blocks that are loaded by one way are stored unchanged, to other places, by another
    one."""
    sent = os.urandom(CHECK_BYTES)
    ctypes.memmove(scratch.arena, sent, CHECK_BYTES)
    _copy(mover, load, Direction.LOAD, range(BLOCKS))
    ctypes.memset(scratch.arena, 0, CHECK_BYTES)
    _copy(mover, store, Direction.STORE, reversed(range(BLOCKS)))
    came = ctypes.string_at(scratch.arena, CHECK_BYTES)
    blocks = [came[i : i + BLOCK_BYTES] for i in range(0, CHECK_BYTES, BLOCK_BYTES)]
    return b"".join(reversed(blocks)) == sent


def _copy(mover: CudaMover, mode: CudaMode, direction: Direction, blocks: Iterable[int]) -> None:
    mover.force(mode)
    offsets = range(0, CHECK_BYTES, BLOCK_BYTES)
    status = mover.wait(mover.submit(direction, list(blocks), offsets), _SECONDS)
    if status is not Status.DONE:
        raise RuntimeError(mover.error() or f"a copy is {status.name} after {_SECONDS:.0f} s")
