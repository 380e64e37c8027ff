# SPDX-License-Identifier: Apache-2.0
"""Builds the fake CUDA driver of this folder and controls it."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

import pytest

from flexkv_kernels import CudaOptions, cuda_unavailable

FOLDER = Path(__file__).resolve().parent
KERNELS = FOLDER.parents[1]
_LIBRARY = "libfakecuda.so"

# Of CUresult.
INVALID_VALUE = 1
INVALID_HANDLE = 400
OUT_OF_MEMORY = 2
UNSUPPORTED_PTX = 222
ILLEGAL_ADDRESS = 700
LAUNCH_FAILED = 719


def build(folder: Path) -> Path:
    """Compiles the driver; skips the test where that cannot be, saying why.

    An unchanged driver is taken from `folder`, or from the folder that FAKE_CUDA_CACHE names.
    """
    folder = Path(os.environ.get("FAKE_CUDA_CACHE", folder), _digest())
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "wb") as lock:  # one process compiles, the others wait
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = folder / _LIBRARY
        return kept if kept.is_file() else _compile(folder)


def _compile(folder: Path) -> Path:
    compiler = host_compiler()
    library = folder / f"{_LIBRARY}.part"
    includes = [KERNELS / "src", KERNELS / "cuda", cuda_include(folder)]
    subprocess.run(
        [
            *shlex.split(compiler),
            *(
                "-std=c++20",
                "-O1",
                "-fPIC",
                "-shared",
                "-fvisibility=hidden",
                "-pthread",
                "-o",
                str(library),
            ),
            *(f"-I{include}" for include in includes),
            str(FOLDER / "driver.cpp"),
        ],
        check=True,
    )
    return library.rename(folder / _LIBRARY)


def host_compiler() -> str:
    """The C++ compiler of this machine, as a command; skips the test where there is none."""
    for command in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if command and shutil.which(shlex.split(command)[0]):
            return command
    pytest.skip("no C++ compiler to build the fake CUDA driver with")


def _digest() -> str:
    """Digest of all that the driver is made from."""
    digest = hashlib.blake2b(digest_size=16)
    for source in (FOLDER, KERNELS / "src", KERNELS / "cuda"):
        for path in sorted(source.glob("*.?pp")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def cuda_include(folder: Path) -> Path:
    """The folder of cuda.h: beside nvcc, or where PyPI's nvidia-cuda-runtime is."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if nvcc is None:
        package = importlib.util.find_spec("nvidia")
        for place in [] if package is None else package.submodule_search_locations or []:
            for header in Path(place).glob("cu*/include/cudaTypedefs.h"):
                return header.parent
        pytest.skip("no nvcc and no nvidia-cuda-runtime, and so no cuda.h for the fake CUDA driver")
    source = folder / "nothing.cu"
    source.touch()
    dry_run = subprocess.run(
        [nvcc, "--dryrun", "-c", str(source)], capture_output=True, text=True, check=False
    ).stderr
    top = re.search(r"TOP=(.*)", dry_run)
    target = re.search(r"_TARGET_DIR_=(targets.*)", dry_run)
    candidates = [Path("/usr/include")]
    if top is not None:
        candidates.append(Path(top[1], "include"))
        if target is not None:
            candidates.append(Path(top[1], target[1], "include"))
    for candidate in candidates:
        if (candidate / "cudaTypedefs.h").is_file():
            return candidate
    pytest.skip(f"no cudaTypedefs.h in {', '.join(map(str, candidates))}")


class FakeCuda:
    """One fake driver, with a state of its own."""

    def __init__(  # noqa: PLR0917
        self,
        path: Path,
        version: int = 13000,
        batches: bool = True,
        major: int = 9,
        devices: int = 1,
        alias: int = 0,
    ) -> None:
        """``path``: a copy of the library that nothing else uses.

        version: of CUDA. batches: whether there are batched copies. major: of the compute
        capability. alias: by how much device addresses of host memory differ from the host's.
        """
        self.path = str(path)
        self._lib = ctypes.CDLL(self.path)
        self._lib.fake_configure.argtypes = (c_int, c_int, c_int, c_int, c_uint64)
        self._lib.fake_delay.argtypes = (c_uint32,)
        self._lib.fake_allow_kernels.argtypes = (c_int64,)
        self._lib.fake_fail.argtypes = (c_char_p, c_int, c_int, c_int)
        self._lib.fake_idle_kernel.argtypes = (c_char_p,)
        self._lib.fake_memory.argtypes = (c_uint64,)
        self._lib.fake_compiled_for.argtypes = (c_int,)
        self._lib.fake_capture_stream.argtypes = (c_void_p, c_int)
        self._lib.fake_calls.argtypes = (c_char_p,)
        self._lib.fake_grid.argtypes = (c_char_p,)
        self._lib.fake_pause.argtypes = (c_char_p, c_int)
        self._lib.fake_stream_create.argtypes = (c_int,)
        self._lib.fake_stream_create.restype = c_void_p
        self._lib.fake_stream_drain.argtypes = (c_void_p,)
        self._lib.fake_stream_destroy.argtypes = (c_void_p,)
        self._lib.fake_stream_fill.argtypes = (c_void_p, c_void_p, c_void_p, c_int, c_size_t)
        self._lib.fake_configure(version, batches, major, devices, alias)
        reason = cuda_unavailable(self.path)
        if reason is not None and "built without CUDA" in reason:
            pytest.skip(reason)

    def options(self, **changes: object) -> CudaOptions:
        return CudaOptions(driver=self.path, **changes)  # type: ignore[arg-type]

    def delay(self, max_us: int) -> None:
        """Work in streams is delayed by random times of up to this."""
        self._lib.fake_delay(max_us)

    def allow_kernels(self, count: int = 1 << 62) -> None:
        """Lets so many more kernels run; those after them wait, as for an engine's."""
        self._lib.fake_allow_kernels(count)

    def fail(self, name: str, code: int, *, skip: int = 0, sticky: bool = False) -> None:
        """Makes the call of the driver's function after the next ``skip`` ones fail.

        "run" is a copy or a kernel that is already in a stream. A sticky failure ends the context.
        """
        self._lib.fake_fail(name.encode(), skip, code, sticky)

    def memory(self, size: int) -> None:
        """Lets the device have so many bytes in all from now on."""
        self._lib.fake_memory(size)

    def compiled_for(self, version: int) -> None:
        """Makes the kernels those of PTX for a processor: 80 for sm_80."""
        self._lib.fake_compiled_for(version)

    def idle_kernel(self, name: str) -> None:
        """The kernel copies nothing from now on, though it ends as if it had."""
        self._lib.fake_idle_kernel(name.encode())

    def capture(self, capturing: bool) -> None:
        """Whether the engine captures a graph, which forbids other threads many calls."""
        self._lib.fake_capture(capturing)

    @property
    def thread_is_clean(self) -> bool:
        """Whether this thread has no context and the capture mode that threads start with."""
        return bool(self._lib.fake_thread_contexts() == 0)

    def calls(self, name: str) -> int:
        """How often a function was called, or a kernel launched."""
        calls: int = self._lib.fake_calls(name.encode())
        return calls

    def grid(self, kernel: str) -> int:
        """The most thread blocks that a launch of the kernel had."""
        grid: int = self._lib.fake_grid(kernel.encode())
        return grid

    @contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Calls of the driver's function wait meanwhile; ``calls("paused NAME")`` counts them."""
        self._lib.fake_pause(name.encode(), True)
        try:
            yield
        finally:
            self._lib.fake_pause(name.encode(), False)

    @property
    def live(self) -> int:
        """Streams, events, allocations, registrations, modules and contexts that exist."""
        live: int = self._lib.fake_live()
        return live


class FakeStream:
    """A stream of the engine, whose work waits until it is released."""

    def __init__(self, fake: FakeCuda, *, legacy: bool = False) -> None:
        """``legacy``: the default stream, whose handle is 1."""
        self._lib = fake._lib
        self.handle: int = self._lib.fake_stream_create(legacy)
        self._released = c_uint32(0)

    def fill(self, address: int, value: int, size: int) -> None:
        """Adds work that sets ``size`` bytes."""
        released = ctypes.addressof(self._released)
        self._lib.fake_stream_fill(self.handle, released, address, value, size)

    def release(self) -> None:
        self._released.value = 1

    def drain(self) -> None:
        """Releases the stream, and waits until its work has run."""
        self.release()
        self._lib.fake_stream_drain(self.handle)

    def capture(self, captured: bool) -> None:
        """Whether the work that is put into the stream goes to a graph."""
        self._lib.fake_capture_stream(self.handle, captured)

    def destroy(self) -> None:
        self._lib.fake_stream_destroy(self.handle)
