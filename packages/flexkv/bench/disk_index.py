# SPDX-License-Identifier: Apache-2.0
"""How long a full disk store of 1,000,000 slots takes to open, and what its index weighs.

`python packages/flexkv/bench/disk_index.py [KEY_BYTES]` prints the rows. Only the table is read, as
`DiskStore` reads it: the slabs are opened, whatever their size, in no time.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

from flexkv.index.slot_index import SlotIndex, restore, slot_index
from flexkv.tiers.disk import table
from flexkv.tiers.disk.files import OsFiles, open_folder, read_fully

SLOTS = 1_000_000
REPEATS = 5
KEY_BYTES = 32
"""Of one of vLLM's or SGLang's hashes. Keys of further groups and of adapters have up to 49."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


def run(key_bytes: int = KEY_BYTES, slots: int = SLOTS) -> list[dict[str, Any]]:
    """Median seconds from a table on disk to its index, and bytes of the index for each slot:
    what the process grew by, and what Python's allocator was asked for, both once the store was
    opened and once every block was replaced by another."""
    with tempfile.TemporaryDirectory(prefix="flexkv-bench-") as folder:
        path = Path(folder, "table")
        _write_table(path, key_bytes, slots)
        # Before all else: memory that was used and freed once would hide what the index takes.
        resident = _weigh(path, key_bytes, _resident)
        tracemalloc.start()
        traced = _weigh(path, key_bytes, lambda: tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        seconds = [_seconds_to_open(path) for _ in range(REPEATS)]
    return [
        {"name": "reopen", "slots": slots, "repeats": REPEATS,
         "seconds": statistics.median(seconds), "samples": seconds},
        *({"name": "memory", "slots": slots, "case": case, "resident": resident[case] / slots,
           "traced": traced[case] / slots} for case in resident),
    ]  # fmt: skip


def _write_table(path: Path, key_bytes: int, slots: int) -> None:
    header = table.Header(2 << 20, slots, 1, "f" * 64, 1)
    with path.open("wb") as file:
        file.write(header.encode() * len(table.HEADER_OFFSETS))
        for slot in range(slots):
            key = os.urandom(key_bytes)
            checksum = os.urandom(table.CHECKSUM_BYTES)
            file.write(table.encode_record(slot, header.seal, key, checksum, slots - slot))
        file.flush()
        os.fsync(file.fileno())


def _open(path: Path) -> SlotIndex:
    """What `DiskStore` does with a table."""
    files = OsFiles()
    folder = open_folder(str(path.parent))
    fd = files.open(folder, path.name, os.O_RDWR)
    os.close(folder)
    header = table.Header.decode(os.pread(fd, table.HEADER_BYTES, 0))
    if header is None:
        raise RuntimeError(f"{path} is not a table")
    records = memoryview(bytearray(header.num_slots * table.RECORD_BYTES))
    read_fully(files, fd, records, table.HEADER_BYTES)
    files.close(fd)
    index = slot_index(header.num_slots)
    restore(index, table.decode_records(records, header.seal))
    if len(index) != header.num_slots:
        raise RuntimeError(f"{len(index)} of {header.num_slots} blocks were found")
    return index


def _seconds_to_open(path: Path) -> float:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    began = time.perf_counter()
    _open(path)
    return time.perf_counter() - began


def _weigh(path: Path, key_bytes: int, measure: Any) -> dict[str, int]:
    """Bytes of an index, by `measure`, which tells the bytes of the whole process."""
    gc.collect()
    before = measure()
    index = _open(path)
    gc.collect()
    opened = measure() - before
    checksum = bytes(table.CHECKSUM_BYTES)
    for _ in range(index.num_slots):
        slot = index.reserve(os.urandom(key_bytes))
        if slot is None:
            raise RuntimeError("no slot to replace")
        index.publish(slot, checksum)
    gc.collect()
    return {"opened": opened, "every block replaced": measure() - before}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


if __name__ == "__main__":
    for row in run(*map(int, sys.argv[1:])):
        print(row)
