# SPDX-License-Identifier: Apache-2.0
"""Tries a device's copies on random bytes: a way that does not give them back is not used."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from contextlib import closing

from flexkv.mover import Direction, Status
from flexkv_kernels.cuda_mover import CudaMover
from flexkv_kernels.cuda_options import CudaMode, CudaOptions
from flexkv_kernels.cuda_scratch import Scratch
from flexkv_kernels.native_mover import PlaneTuple

ROW_BYTES = 256
"""A token's K of a head in bfloat16: the shortest runs there are in practice."""

ROWS, HEADS, LAYERS = 16, 8, 8
BLOCKS = 3
BLOCK_BYTES = ROW_BYTES * ROWS * HEADS * LAYERS

_SECONDS = 10.0


def correct_modes(scratch: Scratch, modes: Sequence[CudaMode]) -> list[CudaMode]:
    """Those of ``modes`` that bring back what was there, in both directions.

    A kernel is tried against DMA, load against store and the other way round. The pages have a
    token's heads side by side, so that every row is moved for itself.

    scratch: its arena has at least ``BLOCKS * BLOCK_BYTES`` bytes. RuntimeError if a copy fails.
    """
    with closing(_mover(scratch, CudaMode.DMA)) as reference:
        correct = []
        for mode in modes:
            with closing(_mover(scratch, mode)) as mover:
                if _comes_back(scratch, mover, reference) and _comes_back(
                    scratch, reference, mover
                ):
                    correct.append(mode)
        return correct


def _mover(scratch: Scratch, mode: CudaMode) -> CudaMover:
    page = ROWS * ROW_BYTES
    planes: list[PlaneTuple] = []
    for head in range(HEADS):
        for layer in range(LAYERS):
            base = scratch.pages + layer * BLOCKS * HEADS * page + head * ROW_BYTES
            place = (head * LAYERS + layer) * page
            planes.append((base, HEADS * page, ROWS, HEADS * ROW_BYTES, ROW_BYTES, place))
    options = CudaOptions(mode=mode, driver=scratch.driver)
    return CudaMover(planes, BLOCKS, scratch.arena, scratch.arena_bytes, scratch.device, options)


def _comes_back(scratch: Scratch, loader: CudaMover, storer: CudaMover) -> bool:
    """Whether blocks that one mover loads are stored unchanged by the other, to other places."""
    size = BLOCKS * BLOCK_BYTES
    sent = os.urandom(size)
    ctypes.memmove(scratch.arena, sent, size)
    _copy(loader, Direction.LOAD, range(BLOCKS))
    ctypes.memset(scratch.arena, 0, size)
    _copy(storer, Direction.STORE, reversed(range(BLOCKS)))
    came = ctypes.string_at(scratch.arena, size)
    blocks = [came[i : i + BLOCK_BYTES] for i in range(0, size, BLOCK_BYTES)]
    return b"".join(reversed(blocks)) == sent


def _copy(mover: CudaMover, direction: Direction, blocks: Iterable[int]) -> None:
    offsets = range(0, BLOCKS * BLOCK_BYTES, BLOCK_BYTES)
    status = mover.wait(mover.submit(direction, list(blocks), offsets), _SECONDS)
    if status is not Status.DONE:
        raise RuntimeError(mover.error() or f"a copy is {status.name} after {_SECONDS:.0f} s")
