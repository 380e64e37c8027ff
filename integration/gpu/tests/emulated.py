# SPDX-License-Identifier: Apache-2.0
"""The emulated driver's device in the place of a GPU, and sizes that it can copy in a test."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from integration.gpu.device import Stream, driver_function
from integration.gpu.sizes import Sizes
from kernels.tests.fake_cuda.fake_driver import FakeCuda, FakeStream

TINY = Sizes(
    blocks=4,
    repeats=1,
    swept_blocks=1,
    swept_repeats=1,
    matrix=32,
    attention_tokens=16,
    products=2,
    submits=3,
)


class EmulatedStream:
    """A stream of the emulated driver. What torch does is done at once."""

    def __init__(self, fake: FakeCuda, synchronize: Callable[[int], int]) -> None:
        self._stream = FakeStream(fake)
        self._stream.release()
        self._synchronize = synchronize

    @property
    def handle(self) -> int:
        return self._stream.handle

    def current(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        assert self._synchronize(self.handle) == 0


class EmulatedGpu:
    """A `Gpu` whose memory is the host's."""

    memory = "cpu"

    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake
        self.driver = fake.path
        self._synchronize = self._function("cuStreamSynchronize", 2000, ctypes.c_void_p)
        self._pop = self._function("cuCtxPopCurrent", 4000, ctypes.c_void_p)

    def start(self) -> None:
        context = ctypes.c_void_p()
        retain = self._function("cuDevicePrimaryCtxRetain", 7000, ctypes.c_void_p, ctypes.c_int)
        assert retain(ctypes.byref(context), 0) == 0
        assert self._function("cuCtxPushCurrent", 4000, ctypes.c_void_p)(context) == 0

    def stop(self) -> None:
        """The thread has no device any more."""
        self._pop(ctypes.byref(ctypes.c_void_p()))

    def stream(self) -> EmulatedStream:
        return EmulatedStream(self._fake, self._synchronize)

    def synchronize(self) -> None:
        pass

    def seconds(self, stream: Stream, work: Callable[[], None]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def _function(self, name: str, since: int, *arguments: Any) -> Callable[..., int]:
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)
        return kind(driver_function(self.driver, name, since))
