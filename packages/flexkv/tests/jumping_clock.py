# SPDX-License-Identifier: Apache-2.0
"""The time of day in processes that jumps when it is told to: a library that replaces libc's clock.

It covers all code of a process that asks libc: Python, Rust and C++ alike.
"""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

from integration.preflight import find_cxx

_SOURCE = r"""
#include <cstdlib>
#include <ctime>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static const volatile long* jump() {
    static const volatile long* found = [] {
        const int file = open(getenv("JUMPING_CLOCK"), O_RDONLY | O_CLOEXEC);
        return static_cast<const volatile long*>(
            mmap(nullptr, sizeof(long), PROT_READ, MAP_SHARED, file, 0));
    }();
    return found;
}

extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
    const long failed = syscall(SYS_clock_gettime, clock, time);
    if (failed == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        time->tv_sec += *jump();
    return static_cast<int>(failed);
}
"""


class JumpingClock:
    """Compiled at once.

    Args:
        folder: receives the library.

    Attributes:
        environ: what processes need to have this clock.
    """

    def __init__(self, folder: Path) -> None:
        self._jump = folder / "jump"
        self.set(0)
        library = folder / "libjumping.so"
        subprocess.run(
            [find_cxx(), "-shared", "-fPIC", "-O1", "-x", "c++", "-", "-o", str(library)],
            input=_SOURCE,
            text=True,
            check=True,
        )
        self.environ = {"LD_PRELOAD": str(library), "JUMPING_CLOCK": str(self._jump)}

    def set(self, seconds: int) -> None:
        """From now on it is so many seconds later than it is; earlier if negative."""
        file = os.open(self._jump, os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(file, struct.pack("l", seconds), 0)
        os.close(file)
