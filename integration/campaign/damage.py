# SPDX-License-Identifier: Apache-2.0
"""What the campaign does to the files of a disk tier while an engine uses them."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from integration.campaign.faults import Kind
from integration.harness import processes

_FLIPPED = bytes(0xFF for _ in range(256))
_ZEROED = 2048
_HEADER_BYTES = 4096
"""Of a table, which must not be damaged for blocks to be found again after a restart."""
_SHARE = 8
"""One part in so many of the slots is damaged each time: enough to be met, and most blocks stay."""


class OpenFiles:
    """The files of a cache directory that the processes `pids` hold open, by what they are: also
    those whose names are gone."""

    def __init__(self, root: Path, pids: list[int], slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self.slabs: list[Path] = []
        self.tables: list[Path] = []
        for pid in pids:
            for link, target in _descriptors(pid):
                if not target.is_relative_to(root):
                    continue
                if target.name.startswith("slab-"):
                    self.slabs.append(link)
                elif target.name.startswith("table"):
                    self.tables.append(link)

    def damage(self, kind: Kind, rng: random.Random) -> None:
        """Do `kind` to them, once."""
        _DAMAGE[kind](self, rng)

    def flip_slots(self, rng: random.Random) -> None:
        for place, file in self._some_slots(rng):
            _flip(file, place + rng.randrange(self._slot_bytes - len(_FLIPPED)))

    def zero_slots(self, rng: random.Random) -> None:
        for place, file in self._some_slots(rng):
            start = rng.randrange(self._slot_bytes // 2)
            os.pwrite(file, bytes(self._slot_bytes - start), place + start)

    def flip_table(self, rng: random.Random) -> None:
        for file, size in _opened(self.tables):
            for _ in range(8):
                _flip(file, rng.randrange(_HEADER_BYTES, size - len(_FLIPPED)))

    def zero_table(self, rng: random.Random) -> None:
        for file, size in _opened(self.tables):
            start = rng.randrange(_HEADER_BYTES, size)
            os.pwrite(file, bytes(min(_ZEROED, size - start)), start)

    def truncate_slab(self, rng: random.Random) -> None:
        for file, size in _opened(self.slabs):
            os.ftruncate(file, size // 4 + rng.randrange(size // 2 + 1))

    def _some_slots(self, rng: random.Random) -> Iterator[tuple[int, int]]:
        for file, size in _opened(self.slabs):
            for place in range(0, size - self._slot_bytes + 1, self._slot_bytes):
                if rng.randrange(_SHARE) == 0:
                    yield place, file


_DAMAGE: dict[Kind, Callable[[OpenFiles, random.Random], None]] = {
    Kind.SLOTS_FLIPPED: OpenFiles.flip_slots,
    Kind.SLOTS_ZEROED: OpenFiles.zero_slots,
    Kind.TABLE_FLIPPED: OpenFiles.flip_table,
    Kind.TABLE_ZEROED: OpenFiles.zero_table,
    Kind.SLAB_TRUNCATED: OpenFiles.truncate_slab,
}
AT_ONCE = frozenset(_DAMAGE)
"""Kinds that `OpenFiles.damage` does."""


@contextlib.contextmanager
def gone(root: Path) -> Iterator[None]:
    """The directory is somewhere else meanwhile. What the cache makes in its place goes."""
    away = root.with_name(root.name + ".away")
    root.rename(away)
    try:
        yield
    finally:
        while True:
            remove(root)
            try:
                away.rename(root)
                break
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise


def remove(root: Path) -> None:
    """Remove the directory, if there is one, although a cache may make it anew at any time."""
    removed = Path(tempfile.mkdtemp(dir=root.parent))
    with contextlib.suppress(FileNotFoundError):
        root.rename(removed / root.name)
    shutil.rmtree(removed, ignore_errors=True)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """The directory and all in it may not be used by anybody meanwhile (but by root)."""
    modes = {}
    for path in (root, *sorted(root.rglob("*"))):
        with _replaced_meanwhile():
            modes[path] = path.stat().st_mode
    for path in reversed(modes):
        with _replaced_meanwhile():
            path.chmod(0)
    try:
        yield
    finally:
        for path, mode in modes.items():
            with _replaced_meanwhile():
                path.chmod(mode)


def _replaced_meanwhile() -> contextlib.suppress:
    """A ledger's draft becomes the ledger at any time."""
    return contextlib.suppress(FileNotFoundError)


def _descriptors(pid: int) -> Iterator[tuple[Path, Path]]:
    """The open files of a process: a path that can be opened, and what it is called."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            yield link, Path(os.readlink(link).removesuffix(" (deleted)"))


def _opened(paths: list[Path]) -> Iterator[tuple[int, int]]:
    """Each as a descriptor, and its size."""
    for path in paths:
        file = os.open(path, os.O_RDWR)
        try:
            yield file, os.fstat(file).st_size
        finally:
            os.close(file)


def _flip(file: int, place: int) -> None:
    there = os.pread(file, len(_FLIPPED), place)
    os.pwrite(file, bytes(a ^ b for a, b in zip(there, _FLIPPED, strict=False)), place)


def find_open_files(root: Path, group: int, slot_bytes: int) -> OpenFiles:
    """The files below `root` that an engine's processes hold open."""
    return OpenFiles(root, processes.group_pids(group), slot_bytes)
