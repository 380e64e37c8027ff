# SPDX-License-Identifier: Apache-2.0
"""A real mount that does not answer: a FUSE file system whose daemon never replies."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_MNT_DETACH = 2


@contextlib.contextmanager
def hung(path: Path) -> Iterator[None]:
    """Hide the directory `path` behind a mount that hangs; skips the test where that is forbidden.

    In the end, calls that hang there fail with ENOTCONN, and the directory is back.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        daemon = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"FUSE is not there: {error}")
    options = f"fd={daemon},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if libc.mount(b"hung", os.fsencode(path), b"fuse", 0, options.encode()):
        os.close(daemon)
        pytest.skip(f"mounting is not allowed here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        # Also if this process is killed, the kernel ends the hang with the descriptor.
        os.close(daemon)
        libc.umount2(os.fsencode(path), _MNT_DETACH)
