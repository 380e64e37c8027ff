# SPDX-License-Identifier: Apache-2.0
"""Checks one cache directory: the right to write there, its file system, its room, its speed.

The speed is measured on a file without a name (open(2), O_TMPFILE): nobody else sees it, and the
kernel removes it when it is closed, or when the process ends. Nothing else is written.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence

from flexkv.layout import USUAL_BLOCK
from flexkv.preflight.findings import Finding, Level
from flexkv.settings import GIB
from flexkv.system.directories import nearest_directory
from flexkv.system.mounts import read_mounts
from flexkv.tiers.disk.disk_store import check_table, slots_within
from flexkv.tiers.disk.files import open_folder, reason_of
from flexkv.tiers.disk.folder import REMOVED, Folder, check_owner, fingerprint_of, folders
from flexkv.tiers.disk.inspect import folder_state
from flexkv.tiers.disk.opening import places_of
from flexkv.types.errors import DiskError
from flexkv.types.texts import size

_CHUNK = 8 << 20
"""Bytes of one write or read: FlexKV's reads of several blocks are about as large."""

_MOST_BYTES = 4 * GIB
"""The most bytes that are written, for the life of the drive."""
_ROOM_SHARE = 8
"""At most an eighth of the free room is written, so that other programs do not run out of it
meanwhile."""

_SLOW_RATE = 500e6
"""Bytes a second. Below, a disk seldom beats computing; any NVMe drive is faster."""

_MEMORY = {"tmpfs", "ramfs"}
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "fuse.sshfs", "lustre", "beegfs"}


def check_directory(path: str, room: float, seconds: float) -> Iterator[Finding]:
    """Check a directory of `ssd_cache_dir`, which `check_root` has accepted, and where blocks may
    take `room` bytes. A missing directory is not created. The drive is measured for so many
    seconds, 0 for not at all. Raises OSError if the file system does not tell its kind or room."""
    name = disk_name(path)
    there = nearest_directory(path)
    missing = there != path
    yield _kind(name, there)
    yield _room(name, there, room, 0 if missing else _own_bytes(path))
    if slots_within(int(room), USUAL_BLOCK) == 0:
        text = f"{size(int(room))} wanted, less than one usual block of {size(USUAL_BLOCK)} takes"
        yield Finding(name, Level.PROBLEM, text, "raise ssd_cache_gb: its unit is GiB")
    if missing:
        yield Finding(name, Level.OK, "does not exist yet: an engine creates it")
        return
    yield from _folders(name, path)
    if not os.access(path, os.W_OK):
        text = f"user {os.geteuid()} cannot write to {path}: engines of other models cannot use it"
        yield Finding(name, Level.ADVICE, text, f"chown {os.geteuid()} {path}")
    if seconds:
        yield _speed(name, path, seconds)


def disk_name(path: str) -> str:
    """The name of the check of a cache directory."""
    return f"disk {path}"


def compare_directories(roots: Sequence[str]) -> Iterator[Finding]:
    """Check whether several cache directories lie on drives of their own."""
    places = places_of(roots)
    by_drive: dict[str, list[str]] = {}
    for root, place in places.items():
        by_drive.setdefault(_drive_of(place.device), []).append(root)
    for drive in by_drive.values():
        if len(drive) > 1:
            change = "name one directory on each drive: several are no faster than one"
            yield Finding("disks", Level.ADVICE, f"{' and '.join(drive)} lie on one drive", change)


def _drive_of(device: int) -> str:
    """A name of the drive of a file system, the same for all partitions of a drive."""
    number = f"{os.major(device)}:{os.minor(device)}"
    path = os.path.realpath(f"/sys/dev/block/{number}")
    return os.path.dirname(path) if os.path.exists(f"{path}/partition") else path


def _folders(name: str, path: str) -> Iterator[Finding]:
    """Check the folders of FlexKV in a cache directory: an engine of the same model may refuse
    one."""
    owner = os.stat(path).st_uid
    for entry in sorted(os.listdir(path)):
        each = os.path.join(path, entry)
        if not fingerprint_of(each) or REMOVED in entry:
            continue
        try:
            folder = Folder(each, open_folder(each))
        except OSError as error:
            yield _refused_folder(name, reason_of(error))
            continue
        try:
            check_owner(folder, path, owner)
            check_table(folder)
        except DiskError as error:
            yield _refused_folder(name, str(error).partition("; allowed: ")[0])
        finally:
            folder.release()


def _refused_folder(name: str, why: str) -> Finding:
    change = "flexkv clear folders, or another directory; a newer FlexKV's blocks need that FlexKV"
    return Finding(name, Level.PROBLEM, f"an engine of that model refuses it: {why}", change)


def measure(path: str, seconds: float) -> tuple[float, float]:
    """Write to the drive of a directory for half of `seconds` without the flush, and read it back,
    past the page cache where that is possible. Returns the bytes that the drive writes, the flush
    included, and reads a second; 0 if there was no room to measure. Raises OSError if the file
    system has no files without a name, or the drive fails."""
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        fd = os.open(path, flags, 0o600)
    try:
        status = os.fstatvfs(fd)
        most = min(_MOST_BYTES, status.f_bavail * status.f_frsize // _ROOM_SHARE)
        with contextlib.closing(mmap.mmap(-1, _CHUNK)) as buffer:
            # Not zeros, which some drives do not store.
            buffer.write(os.urandom(1 << 16) * (_CHUNK >> 16))
            written, wrote = _repeat(lambda at: os.pwrite(fd, buffer, at), most, seconds / 2)
            start = time.monotonic()
            os.fdatasync(fd)
            wrote += time.monotonic() - start
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            view = memoryview(buffer)
            with view:
                read, took = _repeat(lambda at: os.preadv(fd, [view], at), written, seconds / 2)
    finally:
        os.close(fd)
    return written / wrote if written else 0.0, read / took if read else 0.0


def _repeat(call: Callable[[int], int], most: int, seconds: float) -> tuple[int, float]:
    """Make calls one after another until `most` bytes or `seconds` are reached. Returns the bytes
    and the seconds of all calls."""
    done, start = 0, time.monotonic()
    elapsed = 0.0
    while done + _CHUNK <= most and elapsed < seconds:
        done += call(done)
        elapsed = time.monotonic() - start
    return done, elapsed or 1e-9


def _kind(name: str, path: str) -> Finding:
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    kind = next((each.kind for each in read_mounts() if each.device == wanted), "unknown")
    if kind in _MEMORY:
        change = "name a directory on a drive: blocks there take memory and are lost at a reboot"
        return Finding(name, Level.ADVICE, f"lies in memory ({kind})", change)
    if kind == "overlay":
        change = "mount a volume there: a container's own layer is slow and ends with it"
        return Finding(name, Level.ADVICE, "lies in a container's own layer (overlay)", change)
    if kind in _NETWORK:
        change = "name a directory on a local drive, or share blocks through a store (see Cluster)"
        return Finding(name, Level.ADVICE, f"lies on a network ({kind})", change)
    return Finding(name, Level.OK, f"file system {kind}")


def _room(name: str, path: str, wanted: float, own: int) -> Finding:
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    text = f"{size(free)} free" + (f", {size(own)} of FlexKV's" if own else "")
    if free + own >= wanted:
        return Finding(name, Level.OK, f"{text}; {size(int(wanted))} wanted")
    change = f"lower ssd_cache_gb, which gives this directory {size(int(wanted))}, or make room"
    return Finding(name, Level.PROBLEM, text, change)


def _own_bytes(path: str) -> int:
    """Bytes that FlexKV's folders in the directory take on disk. Unreadable folders count as 0."""
    total = 0
    with contextlib.suppress(DiskError):
        for folder in folders(path, True):
            with contextlib.suppress(DiskError):
                total += folder_state(folder).disk_bytes
    return total


def _speed(name: str, path: str, seconds: float) -> Finding:
    try:
        written, read = measure(path, seconds)
    except OSError as error:
        return Finding(name, Level.ADVICE, f"its speed is unknown: {reason_of(error)}")
    if not written:
        return Finding(name, Level.ADVICE, "its speed is unknown: too little room to measure")
    text = f"writes {written / 1e9:.2f} GB/s, reads {read / 1e9:.2f} GB/s"
    if read < _SLOW_RATE:
        change = "use a faster drive: FlexKV computes what it loads no faster than that"
        return Finding(name, Level.ADVICE, text, change)
    return Finding(name, Level.OK, text)
