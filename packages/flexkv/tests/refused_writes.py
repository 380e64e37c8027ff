# SPDX-License-Identifier: Apache-2.0
"""A drive that refuses what removes blocks: erased records, headers of tables and new files."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import pytest

from flexkv.tiers.disk import OsFiles, table
from flexkv.tiers.disk.folder import RESET


def refuse_writes(patch: pytest.MonkeyPatch) -> None:
    """Refuse them in this process until the patch is undone."""
    write, open_file = OsFiles.pwritev, OsFiles.open

    def pwritev(self: OsFiles, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        first = bytes(buffers[0])
        if first == table.EMPTY_RECORD or table.has_magic(first[:8]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(self, fd, buffers, offset)

    def open_(self: OsFiles, folder: int, name: str, flags: int) -> int:
        if name == RESET:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_file(self, folder, name, flags)

    patch.setattr(OsFiles, "pwritev", pwritev)
    patch.setattr(OsFiles, "open", open_)
