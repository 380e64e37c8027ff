# SPDX-License-Identifier: Apache-2.0
"""The data files of a disk store: few, large, allocated before use, cut into slots."""

from __future__ import annotations

import contextlib
import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence

from flexkv.tiers.disk.files import (
    OsFiles,
    exists,
    is_regular,
    open_data,
    read_fully,
    without_trace,
    write_fully,
)

SLAB_BYTES = 16 << 30
"""The most bytes of a slab file: few open files even for a large disk (64 for 1 TiB), and a size
that every file system allows."""

_SLAB = re.compile(r"slab-[0-9]{5,}")


class Slabs:
    """Slots `0..num_slots`, in the files `slab-00000`, `slab-00001`, ... of the directory
    `folder`, an open descriptor that is borrowed by the constructor only.

    Reads and writes are thread-safe. Owns its file descriptors.
    """

    def __init__(self, files: OsFiles, folder: int, slot_bytes: int, num_slots: int) -> None:
        """Open or create the files, allocate all of their bytes, and remove surplus files. Raises
        OSError if the system refuses. Files that were there stay; new ones are removed."""
        self._files = files
        self._slot_bytes = slot_bytes
        self._slots_per_slab = slots_per_slab(slot_bytes)
        self._fds: list[int] = []
        self._sizes: list[int] = []
        self._held: list[int] = []  # bytes that each file had before
        self.direct = True
        created = []
        try:
            for slab in range(-(-num_slots // self._slots_per_slab)):
                name = slab_name(slab)
                if not exists(folder, name):
                    created.append(name)
                fd, direct = open_data(files, folder, name, os.O_RDWR | os.O_CREAT)
                self._fds.append(fd)
                self.direct = self.direct and direct
                slots = min(self._slots_per_slab, num_slots - slab * self._slots_per_slab)
                self._held.append(os.fstat(fd).st_size)
                self._sizes.append(slots * slot_bytes)
                self._size(fd, self._sizes[-1])
            self._remove_from(folder, len(self._fds))
        except OSError:
            self.close()
            for name in created:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
            raise

    def read(self, slot: int, buffers: Sequence[memoryview]) -> list[bool | OSError]:
        """Read `slot` and those behind it, all in one slab, into `buffers`, each of which has a
        slot's length: by one call if that succeeds, else one by one. Returns for each slot whether
        the file has it, or the error of its read."""
        fd, offset = self._place(slot)
        if len(buffers) > 1 and self._moved_all(self._files.preadv, fd, buffers, offset):
            return [True] * len(buffers)
        found: list[bool | OSError] = []
        for place, buffer in enumerate(buffers):
            try:
                at = offset + place * self._slot_bytes
                found.append(read_fully(self._files, fd, buffer, at))
            except OSError as error:
                found.append(without_trace(error))
        return found

    def write(self, slot: int, buffers: Sequence[memoryview]) -> list[OSError | None]:
        """Write `buffers` to `slot` and those behind it, as `read` does. Returns for each slot the
        error of its write; None if there was none."""
        fd, offset = self._place(slot)
        errors: list[OSError | None] = [None] * len(buffers)
        if len(buffers) > 1 and self._moved_all(self._files.pwritev, fd, buffers, offset):
            return errors
        for place, buffer in enumerate(buffers):
            try:
                write_fully(self._files, fd, buffer, offset + place * self._slot_bytes)
            except OSError as error:
                errors[place] = without_trace(error)
        return errors

    @property
    def were_whole(self) -> bool:
        """Whether the files had all slots before they were opened."""
        return all(map(operator.ge, self._held, self._sizes))

    def held(self, slot: int) -> bool:
        """Whether the files had this slot before they were opened."""
        slab, place = divmod(slot, self._slots_per_slab)
        return self._held[slab] >= (place + 1) * self._slot_bytes

    def files(self) -> Iterator[tuple[str, int, int]]:
        """Name, descriptor and size of each file."""
        for slab, (fd, size) in enumerate(zip(self._fds, self._sizes, strict=True)):
            yield slab_name(slab), fd, size

    def close(self) -> None:
        """Idempotent."""
        for fd in self._fds:
            with contextlib.suppress(OSError):
                self._files.close(fd)
        self._fds.clear()

    def _moved_all(
        self,
        move: Callable[[int, Sequence[memoryview], int], int],
        fd: int,
        buffers: Sequence[memoryview],
        offset: int,
    ) -> bool:
        """Whether one call has read or written all of the buffers."""
        try:
            return move(fd, buffers, offset) == len(buffers) * self._slot_bytes
        except OSError:
            return False

    def _place(self, slot: int) -> tuple[int, int]:
        slab, place = divmod(slot, self._slots_per_slab)
        return self._fds[slab], place * self._slot_bytes

    def _size(self, fd: int, length: int) -> None:
        if os.fstat(fd).st_size > length:
            self._files.truncate(fd, length)
        self._files.allocate(fd, length)

    def _remove_from(self, folder: int, slab: int) -> None:
        while is_regular(folder, name := slab_name(slab)):
            os.unlink(name, dir_fd=folder)
            slab += 1


def slots_per_slab(slot_bytes: int) -> int:
    """How many slots a slab has."""
    return max(1, SLAB_BYTES // slot_bytes)


def is_slab(name: str) -> bool:
    """Whether a file is named like a slab."""
    return _SLAB.fullmatch(name) is not None


def slab_name(slab: int) -> str:
    """The file name of a slab."""
    return f"slab-{slab:05d}"
