# SPDX-License-Identifier: Apache-2.0
"""Finds the process that owns a folder: by the kernel's list of locks, and by what the owner writes
into the lock, the ids of its own and its parent's in its PID namespace."""

from __future__ import annotations

import contextlib
import os
import re

from flexkv.system.mounts import read_mounts
from flexkv.system.processes import parent_of, pid_namespace, process_text
from flexkv.system.regular_files import open_regular
from flexkv.tiers.disk.files import open_folder

LOCK = "lock"
LOCK_CONTENT = re.compile(rb"[0-9 \n\0]*")  # a power failure may leave zeros in the file
LOCK_BYTES = 32


def lock_content() -> bytes:
    """What an owner writes into the lock."""
    return f"{os.getpid()} {os.getppid()} {pid_namespace()}\n".encode()


def describe_owner(path: str) -> str:
    """The process id of the folder's owner as text, or "unknown"; with what a user must know to
    find and to judge it."""
    seen: int | None = None
    try:
        folder = open_folder(path)
        try:
            with contextlib.suppress(Exception):  # without a list of locks, the content must do
                seen = owner_of(folder)
            pid, parent, namespace = _recorded(folder)
        finally:
            os.close(folder)
    except (OSError, ValueError):
        return str(seen or "unknown")
    if namespace != pid_namespace():
        own = process_text(pid, namespace)
        return f"{seen} ({own})" if seen else own
    if parent_of(pid) in (parent, None):
        return str(pid)
    return f"{pid}, whose parent process {parent} has died (end it if that was its server)"


def _recorded(folder: int) -> list[int]:
    """What `lock_content` has written.

    Raises:
        OSError: the lock cannot be read.
        ValueError: it is damaged.
    """
    fd = open_regular(folder, LOCK, os.O_RDONLY)
    try:
        ids = [int(each) for each in os.pread(fd, LOCK_BYTES, 0).split()]
    finally:
        os.close(fd)
    if len(ids) != len(lock_content().split()):
        raise ValueError("the lock is damaged")
    return ids


def owner_of(folder: int) -> int | None:
    """Find the process id of the engine that owns the open directory `folder`.

    Reads the kernel's list of locks and does not touch the lock. The list contains only processes
    of this PID namespace and of those below it. An engine in another container is missing.

    Returns:
        The process id; None if no visible process owns the folder, or it has no lock file.

    Raises:
        OSError: the lock file or the list cannot be read.
    """
    try:
        fd = open_regular(folder, LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        file = f"{_lock_device(fd)}:{os.fstat(fd).st_ino}"
    finally:
        os.close(fd)
    with open("/proc/locks", encoding="ascii") as locks:
        for line in locks:
            # 1: FLOCK  ADVISORY  WRITE 19469 fe:00:2148231 0 EOF
            fields = line.split()
            if fields[1] == "FLOCK" and fields[3] == "WRITE" and fields[5] == file:
                return int(fields[4])
    return None


def _lock_device(fd: int) -> str:
    """The device of an open file as in /proc/locks: the device of its mount.

    On btrfs stat(2) returns another device, one for each subvolume.
    """
    device = os.fstat(fd).st_dev
    major, minor = os.major(device), os.minor(device)
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as info:
        mount = next(line.split()[1] for line in info if line.startswith("mnt_id:"))
    for each in read_mounts():
        if each.number == mount:
            major, minor = map(int, each.device.split(":"))
    return f"{major:02x}:{minor:02x}"
