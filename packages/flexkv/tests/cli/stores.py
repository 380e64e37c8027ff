# SPDX-License-Identifier: Apache-2.0
"""Real stores on disk, and a process that plays the engine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flexkv.tiers.base import BlockResult
from flexkv.tiers.disk import table
from flexkv.tiers.disk.files import OsFiles, open_folder
from flexkv.tiers.disk.table_reader import FoundTable, Record, read_table
from flexkv.tiers.job import Outcome, Priority
from packages.flexkv.tests.cli import engine

FINGERPRINT = "0123456789abcdef"
OTHER_FINGERPRINT = "fedcba9876543210"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache directory."""

    root: Path
    block_bytes: int = engine.BLOCK_BYTES
    capacity: int = engine.CAPACITY

    @property
    def folder(self) -> Path:
        return self.root / FINGERPRINT

    @property
    def slab(self) -> Path:
        return self.folder / "slab-00000"

    def fill(self, count: int, read: int = 0) -> None:
        """Write `count` blocks, then read back the first `read` of them."""
        tier = engine.opened(str(self.root), FINGERPRINT, self.block_bytes, self.capacity)
        engine.write(tier, 0, count)
        names = [number.to_bytes(16, "big") for number in range(read)]
        tier.read(names, [engine.block(0) for _ in names], Priority.LOAD)
        results: list[BlockResult] = []
        while len(results) < read:
            results += tier.poll()
        assert all(result.outcome is Outcome.DONE for result in results)
        assert tier.close()

    def records(self) -> list[Record]:
        return list(self.table().records())

    def table(self) -> FoundTable:
        folder = open_folder(str(self.folder))
        try:
            return read_table(OsFiles(), folder, FINGERPRINT)
        finally:
            os.close(folder)

    def damage_headers(self) -> None:
        """Change a byte in each copy of the table's header."""
        with open(self.folder / "table", "r+b") as file:
            for copy in table.HEADER_OFFSETS:
                file.seek(copy + 20)
                file.write(b"X")

    def make_newer(self) -> None:
        """Let both copies of the table's header name the next version of the format."""
        with open(self.folder / "table", "r+b") as file:
            for copy in table.HEADER_OFFSETS:
                file.seek(copy + 8)
                file.write((table.VERSION + 1).to_bytes(4, "little"))

    def flip(self, slot: int) -> None:
        """Change one byte in the middle of a slot."""
        fd = os.open(self.slab, os.O_RDWR)
        offset = slot * self.block_bytes + self.block_bytes // 2
        (byte,) = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte ^ 1]), offset)
        os.fsync(fd)
        os.close(fd)

    @contextlib.contextmanager
    def owned(self, mode: str = "hold", fingerprint: str = FINGERPRINT) -> Iterator[int]:
        """Another process owns the folder meanwhile; gives its process id."""
        command = [sys.executable, engine.__file__, str(self.root), fingerprint, mode]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
            process.communicate()
        assert process.returncode == 0


class Flexkv(Protocol):
    """Runs the command `flexkv` with arguments."""

    def __call__(self, *arguments: object) -> Ended: ...


class FlexkvOnTerminal(Protocol):
    """Runs the command `flexkv` with arguments on a terminal, and types `answer`."""

    def __call__(self, *arguments: object, answer: str = "") -> Ended: ...


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """All files below a folder with times and bytes."""
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_ino, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }
