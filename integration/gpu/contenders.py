# SPDX-License-Identifier: Apache-2.0
"""What FlexKV is measured against, over the same memory and in the same order."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flexkv.mover import Direction
from integration import preflight
from integration.gpu.rig import Copy, Rig
from integration.gpu.shapes import Order, Shape

Enqueue = Callable[[], None]
"""Puts all copies of an order into the current stream, and returns."""

LARGE = "one large copy"
TRITON = "Triton copy, 12 SMs"
PAGEWISE = "page by page"


def large(rig: Rig, direction: Direction, start: int, size: int) -> Enqueue:
    """One copy of `size` bytes from byte `start` of pages and slots on: the link's own speed."""
    addresses = rig.base + start, rig.arena.address + rig.arena.spec.slots_offset + start
    target, source = addresses if direction is Direction.LOAD else addresses[::-1]
    return lambda: _check(driver_copy()(target, source, size, _stream()))


def by_triton(rig: Rig, shape: Shape, direction: Direction, order: Order) -> list[Enqueue]:
    """The order by a Triton kernel, once for each size of chunk it may take.

    Raises:
        ImportError: there is no Triton.
    """
    from integration.gpu.triton_copy import CHUNK_WORDS, launch

    sources, targets = (a.pin_memory() for a in _ends(rig, shape, direction, order))
    return [
        lambda words=words: launch(sources, targets, shape.run_bytes, words)  # type: ignore[misc]
        for words in CHUNK_WORDS
    ]


def page_by_page(rig: Rig, shape: Shape, direction: Direction, order: Order) -> Enqueue:
    """One cuMemcpyAsync for each run of the order, from a loop in native code."""
    sources, targets = _ends(rig, shape, direction, order)
    loop, copy = page_loop(), driver_copy()

    def enqueue() -> None:
        code = loop(
            copy,
            targets.data_ptr(),
            sources.data_ptr(),
            sources.numel(),
            shape.run_bytes,
            _stream(),
        )
        _check(code)

    return enqueue


def finished(enqueue: Enqueue) -> Copy:
    """The same, done when it returns."""

    def copy() -> None:
        enqueue()
        torch.cuda.current_stream().synchronize()

    return copy


@cache
def driver_copy() -> Any:
    """cuMemcpyAsync(target, source, bytes, stream); cudaMemcpyAsync is this behind more checks."""
    function = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


@cache
def page_loop() -> Any:
    """The loop of page_by_page.cpp.

    Raises:
        PreflightError: there is no compiler.
    """
    source = Path(__file__).with_name("page_by_page.cpp")
    with tempfile.TemporaryDirectory(prefix="flexkv-gpu-") as folder:
        library = Path(folder, "page_by_page.so")
        command = [*preflight.find_cxx().split(), "-O2", "-shared", "-fPIC", str(source)]
        subprocess.run([*command, "-o", str(library)], check=True)
        function = ctypes.CDLL(str(library)).copy_pages
    pointer = ctypes.c_void_p
    function.argtypes = [pointer, pointer, pointer, ctypes.c_uint64, ctypes.c_size_t, pointer]
    function.restype = ctypes.c_int
    return function


def _ends(rig: Rig, shape: Shape, direction: Direction, order: Order) -> tuple[Any, Any]:
    pages, arena = rig.addresses(shape, order)
    return (arena, pages) if direction is Direction.LOAD else (pages, arena)


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def _check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"cuMemcpyAsync failed with CUresult {code}")
