# SPDX-License-Identifier: Apache-2.0
"""Finds and loads the shared object of this package and declares its functions.

The declarations mirror the headers in ``include/flexkv``, which document them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
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
    """Path of the shared object in the first of ``directories`` that has it.

    Raises:
        ImportError: no directory has it.
    """
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
    """Load the shared object at ``path`` and declare its functions.

    Args:
        path: path of the shared object.
        abi_version: the version that it must have.

    Raises:
        ImportError: the file cannot be loaded, or has another version.
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
    _declare_waiting(library.waiting)
    _declare_cuda(library.waiting)
    _declare_brief(library.brief)
    return library


def _declare_waiting(lib: ctypes.CDLL) -> None:
    lib.fkv_cpu_mover_create.restype = address
    lib.fkv_cpu_mover_create.argtypes = (
        POINTER(LayoutStruct),
        POINTER(CpuOptionsStruct),
        c_char_p,
        c_size_t,
    )
    lib.fkv_mover_wait.restype = c_int
    lib.fkv_mover_wait.argtypes = (address, c_int64, c_int64)
    _declare_hold(lib)
    lib.fkv_mover_close.restype = None
    lib.fkv_mover_close.argtypes = (address,)
    lib.fkv_mover_destroy.restype = None
    lib.fkv_mover_destroy.argtypes = (address,)
    lib.fkv_mover_error.restype = c_int
    lib.fkv_mover_error.argtypes = (address, c_char_p, c_size_t)
    lib.fkv_bench_memcpy.restype = c_int
    lib.fkv_bench_memcpy.argtypes = (
        address,
        address,
        c_uint64,
        c_uint32,
        c_uint32,
        POINTER(c_double),
    )


def _declare_cuda(lib: ctypes.CDLL) -> None:
    lib.fkv_cuda_devices.restype = c_int
    lib.fkv_cuda_devices.argtypes = (c_char_p, c_char_p, c_size_t)
    lib.fkv_cuda_describe.restype = c_int
    lib.fkv_cuda_describe.argtypes = (
        c_char_p,
        c_int32,
        POINTER(CudaDeviceStruct),
        c_char_p,
        c_size_t,
    )
    lib.fkv_cuda_mover_create.restype = address
    lib.fkv_cuda_mover_create.argtypes = (
        POINTER(LayoutStruct),
        POINTER(CudaOptionsStruct),
        c_char_p,
        c_size_t,
    )
    lib.fkv_cuda_mover_force.restype = c_int
    lib.fkv_cuda_mover_force.argtypes = (address, c_uint32, c_uint32, c_uint64, c_char_p, c_size_t)
    lib.fkv_cuda_mover_ring_bytes.restype = c_uint64
    lib.fkv_cuda_mover_ring_bytes.argtypes = (address,)
    lib.fkv_cuda_alloc.restype = c_uint64
    lib.fkv_cuda_alloc.argtypes = (c_char_p, c_int32, c_uint64, c_char_p, c_size_t)
    lib.fkv_cuda_free.restype = None
    lib.fkv_cuda_free.argtypes = (c_uint64,)


def _declare_brief(lib: ctypes.PyDLL) -> None:
    lib.fkv_cpu_kernels.restype = c_char_p
    lib.fkv_cpu_kernels.argtypes = ()
    lib.fkv_mover_block_bytes.restype = c_uint64
    lib.fkv_mover_block_bytes.argtypes = (address,)
    lib.fkv_mover_submit.restype = c_int64
    lib.fkv_mover_submit.argtypes = (
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
        c_char_p,
        c_size_t,
    )
    lib.fkv_mover_mark.restype = c_int64
    lib.fkv_mover_mark.argtypes = (address, c_uint64, c_char_p, c_size_t)
    lib.fkv_mover_path_bytes.restype = None
    lib.fkv_mover_path_bytes.argtypes = (address, POINTER(c_uint64))
    lib.fkv_mover_poll.restype = c_int
    lib.fkv_mover_poll.argtypes = (address, c_int64)
    lib.fkv_hazard_policy_type.restype = py_object
    lib.fkv_hazard_policy_type.argtypes = ()
    lib.fkv_block_index_type.restype = py_object
    lib.fkv_block_index_type.argtypes = (py_object,)
    lib.fkv_block_index_bytes.restype = c_uint64
    lib.fkv_block_index_bytes.argtypes = (c_uint64,)
    lib.fkv_index_reader_type.restype = py_object
    lib.fkv_index_reader_type.argtypes = ()
    lib.fkv_slot_index_type.restype = py_object
    lib.fkv_slot_index_type.argtypes = ()
    lib.fkv_key_set_bytes.restype = c_uint64
    lib.fkv_key_set_bytes.argtypes = (c_uint64,)
    lib.fkv_key_set_type.restype = py_object
    lib.fkv_key_set_type.argtypes = ()
    lib.fkv_packed_keys_type.restype = py_object
    lib.fkv_packed_keys_type.argtypes = ()
    lib.fkv_block_uses_type.restype = py_object
    lib.fkv_block_uses_type.argtypes = ()
    lib.fkv_fill_calendar_type.restype = py_object
    lib.fkv_fill_calendar_type.argtypes = ()
    lib.fkv_extend_tables.restype = py_object
    lib.fkv_extend_tables.argtypes = ()
    lib.fkv_mover_copy_ns.restype = c_int64
    lib.fkv_mover_copy_ns.argtypes = (address, c_int64)
    _declare_hold(lib)


def _declare_hold(lib: ctypes.CDLL) -> None:
    lib.fkv_mover_hold.restype = c_int
    lib.fkv_mover_hold.argtypes = (address, c_int64, c_uint64, c_int64, c_char_p, c_size_t)


# The package's own search path and not __file__: an editable install keeps sources and the shared
# object in different folders.
LIBRARY = load(find(list(sys.modules["flexkv_kernels"].__path__)))
