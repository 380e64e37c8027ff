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

from flexkv.types.mover import Direction
from integration import preflight
from integration.gpu.device import Stream, driver_copy
from integration.gpu.lab import Lab
from integration.gpu.rig import Copy
from integration.gpu.shapes import Order, Shape

Enqueue = Callable[[Stream], None]
"""Puts all copies of an order into a stream, and returns."""

LARGE = "one large copy"
TRITON = "Triton copy, 12 SMs"
PAGEWISE = "page by page"


def large(lab: Lab, direction: Direction, start: int, size: int) -> Enqueue:
    """One copy of `size` bytes from byte `start` of pages and slots on: the link's own speed."""
    rig = lab.rig
    addresses = rig.base + start, rig.arena.address + rig.arena.spec.slots_offset + start
    target, source = addresses if direction is Direction.LOAD else addresses[::-1]
    copy = driver_copy(lab.gpu.driver)
    return lambda stream: _check(copy(target, source, size, stream.handle))


def by_triton(lab: Lab, shape: Shape, direction: Direction, order: Order) -> list[Enqueue]:
    """The order by a Triton kernel, once for each size of chunk it may take.

    Raises:
        ImportError: there is no Triton.
    """
    from integration.gpu.triton_copy import CHUNK_WORDS, launch

    sources, targets = (a.pin_memory() for a in _ends(lab, shape, direction, order))

    def enqueue(stream: Stream, words: int) -> None:
        with stream.current():
            launch(sources, targets, shape.run_bytes, words)

    return [lambda stream, words=words: enqueue(stream, words) for words in CHUNK_WORDS]  # type: ignore[misc]


def page_by_page(lab: Lab, shape: Shape, direction: Direction, order: Order) -> Enqueue:
    """One cuMemcpyAsync for each run of the order, from a loop in native code."""
    sources, targets = _ends(lab, shape, direction, order)
    loop, copy = page_loop(), driver_copy(lab.gpu.driver)

    def enqueue(stream: Stream) -> None:
        code = loop(
            copy,
            targets.data_ptr(),
            sources.data_ptr(),
            sources.numel(),
            shape.run_bytes,
            stream.handle,
        )
        _check(code)

    return enqueue


def finished(lab: Lab, enqueue: Enqueue) -> Copy:
    """The same, done when it returns."""
    stream = lab.gpu.stream()

    def copy() -> None:
        enqueue(stream)
        stream.synchronize()

    return copy


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


def _ends(lab: Lab, shape: Shape, direction: Direction, order: Order) -> tuple[Any, Any]:
    pages, arena = lab.rig.addresses(shape, order)
    return (arena, pages) if direction is Direction.LOAD else (pages, arena)


def _check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"cuMemcpyAsync failed with CUresult {code}")
