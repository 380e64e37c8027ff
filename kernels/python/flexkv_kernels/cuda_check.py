# SPDX-License-Identifier: Apache-2.0
"""Tries a device's copies on random bytes. A way that does not return them unchanged is not used.

The sizes below are those of the trial.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from contextlib import closing

from flexkv.types.mover import Direction, Status
from flexkv_kernels.cuda_mover import CudaMover
from flexkv_kernels.cuda_options import CudaMode, CudaOptions
from flexkv_kernels.cuda_scratch import Scratch
from flexkv_kernels.native_mover import PlaneTuple

ROW_BYTES = 256
"""A token's K of one head of 128 numbers in bfloat16: about the shortest runs in practice."""

ROWS, HEADS, LAYERS = 16, 8, 8
BLOCKS = 3
BLOCK_BYTES = ROW_BYTES * ROWS * HEADS * LAYERS

_SECONDS = 10.0
"""Time limit for one copy, which takes milliseconds at most. Not tuned."""


def correct_modes(scratch: Scratch, modes: Sequence[CudaMode]) -> list[CudaMode]:
    """Find the ways that copy correctly in both directions.

    Each way is tried against DMA: it loads blocks that DMA stores, and stores blocks that DMA
    loads. The pages have the heads of a token side by side, so that each row is copied by itself.

    Args:
        scratch: memory whose arena has at least ``BLOCKS * BLOCK_BYTES`` bytes.
        modes: the ways to try.

    Returns:
        The correct ones of ``modes``, in the same order.

    Raises:
        RuntimeError: a copy fails.
        ValueError: there can be no mover on this device.
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
    """Whether ``storer`` stores unchanged, to other places, the blocks that ``loader`` loads."""
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
