# SPDX-License-Identifier: Apache-2.0
"""Finds and loads the shared object of this package and declares its functions.

The declarations mirror the headers in ``include/flexkv``, which document them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from ctypes import (
    POINTER,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    py_object,
)
from ctypes import c_void_p as address
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ABI_VERSION = 13
"""The ``FKV_ABI_VERSION`` these declarations were written for."""

EINVAL = -1
ECLOSED = -2
ENOMEM = -3

HELD = 3
"""``FKV_HELD``."""


class PlaneStruct(ctypes.Structure):
    """``fkv_plane``."""

    _fields_ = (
        ("base", c_uint64),
        ("block_stride", c_uint64),
        ("rows", c_uint64),
        ("row_stride", c_uint64),
        ("row_bytes", c_uint64),
        ("slot_offset", c_uint64),
    )


class LayoutStruct(ctypes.Structure):
    """``fkv_layout``."""

    _fields_ = (
        ("planes", POINTER(PlaneStruct)),
        ("n_planes", c_uint32),
        ("store_first", c_uint32),
        ("store_count", c_uint32),
        ("num_blocks", c_uint64),
        ("arena", address),
        ("arena_bytes", c_uint64),
    )


class CpuOptionsStruct(ctypes.Structure):
    """``fkv_cpu_options``."""

    _fields_ = (
        ("threads", c_uint32),
        ("kernel", c_char_p),
        ("chunk_bytes", c_uint64),
        ("stream_bytes", c_uint64),
    )


class CudaChoiceStruct(ctypes.Structure):
    """``fkv_cuda_choice``."""

    _fields_ = (
        ("direction", c_uint32),
        ("mode", c_uint32),
        ("run_bytes", c_uint64),
        ("slot_run_bytes", c_uint64),
        ("thread_blocks", c_uint32),
    )


class CudaOptionsStruct(ctypes.Structure):
    """``fkv_cuda_options``."""

    _fields_ = (
        ("device", c_int32),
        ("mode", c_uint32),
        ("choices", POINTER(CudaChoiceStruct)),
        ("n_choices", c_uint32),
        ("thread_blocks", c_uint32),
        ("ring_bytes", c_uint64),
        ("driver", c_char_p),
    )


class CudaDeviceStruct(ctypes.Structure):
    """``fkv_cuda_device``."""

    _fields_ = (
        ("name", c_char * 128),
        ("pci_bus_id", c_char * 32),
        ("major", c_int32),
        ("minor", c_int32),
        ("multiprocessors", c_int32),
        ("driver_version", c_int32),
    )


_MESSAGE = (c_char_p, c_size_t)
"""A buffer for a message, and its size."""
_HOLD = (c_int, address, c_int64, c_uint64, c_int64, *_MESSAGE)

_WAITING: Mapping[str, Sequence[Any]] = {
    "fkv_cpu_mover_create": (address, POINTER(LayoutStruct), POINTER(CpuOptionsStruct), *_MESSAGE),
    "fkv_mover_wait": (c_int, address, c_int64, c_int64),
    "fkv_mover_hold": _HOLD,
    "fkv_mover_close": (None, address),
    "fkv_mover_destroy": (None, address),
    "fkv_mover_error": (c_int, address, *_MESSAGE),
    "fkv_bench_memcpy": (c_int, address, address, c_uint64, c_uint32, c_uint32, POINTER(c_double)),
    "fkv_cuda_devices": (c_int, c_char_p, *_MESSAGE),
    "fkv_cuda_describe": (c_int, c_char_p, c_int32, POINTER(CudaDeviceStruct), *_MESSAGE),
    "fkv_cuda_mover_create": (
        address,
        POINTER(LayoutStruct),
        POINTER(CudaOptionsStruct),
        *_MESSAGE,
    ),
    "fkv_cuda_mover_force": (c_int, address, c_uint32, c_uint32, c_uint64, *_MESSAGE),
    "fkv_cuda_mover_ring_bytes": (c_uint64, address),
    "fkv_cuda_alloc": (c_uint64, c_char_p, c_int32, c_uint64, *_MESSAGE),
    "fkv_cuda_free": (None, c_uint64),
}
"""The functions that are called through `Library.waiting`: the type of the result, and those of the
arguments."""

_BRIEF: Mapping[str, Sequence[Any]] = {
    "fkv_cpu_kernels": (c_char_p,),
    "fkv_mover_block_bytes": (c_uint64, address),
    "fkv_mover_submit": (
        c_int64,
        address,
        c_int,
        address,
        address,
        c_uint64,
        c_uint32,
        c_uint32,
        c_uint64,
        c_int64,
        address,
        *_MESSAGE,
    ),
    "fkv_mover_mark": (c_int64, address, c_uint64, *_MESSAGE),
    "fkv_mover_path_bytes": (None, address, POINTER(c_uint64)),
    "fkv_mover_poll": (c_int, address, c_int64),
    "fkv_mover_copy_ns": (c_int64, address, c_int64),
    "fkv_mover_hold": _HOLD,
    "fkv_hazard_policy_type": (py_object,),
    "fkv_block_index_type": (py_object, py_object),
    "fkv_block_index_bytes": (c_uint64, c_uint64),
    "fkv_index_reader_type": (py_object,),
    "fkv_slot_index_type": (py_object,),
    "fkv_key_set_bytes": (c_uint64, c_uint64),
    "fkv_key_set_type": (py_object,),
    "fkv_packed_keys_type": (py_object,),
    "fkv_block_uses_type": (py_object,),
    "fkv_fill_calendar_type": (py_object,),
    "fkv_extend_tables": (py_object,),
}
"""The same for `Library.brief`."""


@dataclass(frozen=True, slots=True)
class Library:
    """The shared object, loaded twice. Calls through ``waiting`` release the GIL; calls through
    ``brief`` keep it. Submit and poll take a few microseconds. If they released the GIL, a busy
    process might need a whole switch interval (5 ms) to get it back."""

    waiting: ctypes.CDLL
    brief: ctypes.PyDLL


def library_name() -> str:
    """File name of the shared object on this platform."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return f"libflexkv_kernels.{suffix}"


def find(directories: Sequence[str]) -> Path:
    """Path of the shared object in the first of ``directories`` that has it. Raises ImportError if
    no directory has it."""
    for directory in directories:
        path = Path(directory) / library_name()
        if path.is_file():
            return path
    raise ImportError(
        f"flexkv-kernels is not built: {library_name()} is missing from"
        f" {' and '.join(directories)}. Install the package with pip (from source that needs a"
        " C++20 compiler: GCC >= 11 or Clang >= 14)."
    )


def load(path: Path, abi_version: int = ABI_VERSION) -> Library:
    """Load the shared object at ``path`` and declare its functions. Raises ImportError if the file
    cannot be loaded, or has another version.

    Args:
        path: path of the shared object.
        abi_version: the version that it must have.
    """
    try:
        library = Library(ctypes.CDLL(str(path)), ctypes.PyDLL(str(path)))
        version = library.brief.fkv_abi_version
    except (OSError, AttributeError) as error:
        raise ImportError(f"{path} is not a usable library of flexkv-kernels: {error}") from error
    version.restype = c_uint32
    if version() != abi_version:
        raise ImportError(
            f"{path} has ABI version {version()}, this Python package needs {abi_version}:"
            " reinstall flexkv-kernels."
        )
    _declare(library.waiting, _WAITING)
    _declare(library.brief, _BRIEF)
    return library


def _declare(library: ctypes.CDLL, functions: Mapping[str, Sequence[Any]]) -> None:
    for name, (result, *arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


# The package's own search path and not __file__: an editable install keeps sources and the shared
# object in different folders.
LIBRARY = load(find(list(sys.modules["flexkv_kernels"].__path__)))
