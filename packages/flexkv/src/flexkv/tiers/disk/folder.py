# SPDX-License-Identifier: Apache-2.0
"""Finds, creates, locks and guards the folders below a cache directory.

DIR/<fingerprint>/            the cache of the first engine with blocks of this fingerprint
DIR/<fingerprint>-1/          the cache of a second engine at the same time, if this is allowed
    lock  table  slab-00000 ...  counters.json  identity  descriptions
DIR/<name>.removed-<random>/  a folder whose removal is under way or was interrupted

A folder is FlexKV's if it holds a table, which begins with FlexKV's magic bytes; or if the table is
lost, and the folder holds files of blocks and nothing but files with the names above. The name of a
folder proves nothing. In FlexKV's folders, FlexKV touches only files with these names.

An owner writes the ids of its process and its parent's, in its PID namespace, into the lock. Who
wants to know the owner also reads the kernel's list of locks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import time
from dataclasses import dataclass

from flexkv.system.directories import (
    OTHERS,
    WRITABLE,
    check_creatable,
    nearest_directory,
    open_directory,
    root_ids,
)
from flexkv.system.forks import close_in_children
from flexkv.system.mounts import read_mounts
from flexkv.system.processes import parent_of, pid_namespace, process_text
from flexkv.system.regular_files import closing_fd, open_regular
from flexkv.tiers.disk import descriptions, ledger, table
from flexkv.tiers.disk.files import disk_error, is_regular, open_folder, reason_of, try_lock
from flexkv.tiers.disk.slabs import is_slab, slab_name
from flexkv.types.errors import DiskError, UnavailableError

logger = logging.getLogger(__name__)

LOCK = "lock"
TABLE = "table"
RESET = "reset"
IDENTITY = "identity"
MAX_OWNERS = 64
"""The most engines with blocks of one fingerprint that share a directory. More than a node has
data-parallel ranks."""

_OWN_NAMES = frozenset(
    {LOCK, TABLE, RESET, IDENTITY, ledger.FILE, ledger.SCRATCH, descriptions.FILE}
)
_LOCK_CONTENT = re.compile(rb"[0-9 \n\0]*")  # a power failure may leave zeros in the file
_LOCK_BYTES = 32
_FOLDER = re.compile(r"(?P<fingerprint>[0-9a-f]{16,64})(-[0-9]+)?(?P<removed>\.removed-[0-9a-f]+)?")
REMOVED = ".removed-"
"""Part of the name of a folder that is being removed; random digits follow it."""
_TRIES = 10
_TRY_SECONDS = 0.05
"""Attempts of a starting engine to lock a folder, and seconds between them. A process that removes
a folder holds its lock for a few system calls, until it has renamed the folder. Not tuned."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Folder:
    """A folder that this process owns until `release`, with descriptors of the directory and of the
    file that holds the lock."""

    path: str
    fd: int
    lock: int = -1

    def release(self) -> None:
        """Release the lock and close both descriptors. Idempotent."""
        for fd in (self.lock, self.fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self.lock = -1

    def leave_to_parent(self) -> None:
        """See `forks.Owner`. The lock belongs to the open file. While a child has the file open, no
        other process can own the folder."""
        self.release()


def folders(root: str, leftovers: bool = False) -> list[str]:
    """Paths of the folders below the cache directory `root` that are FlexKV's, sorted by name; with
    `leftovers`, those whose removal was interrupted are among them. Folders that have a name of
    FlexKV and that this user cannot read are, too. Raises DiskError if `root` cannot be read."""
    try:
        names = sorted(os.listdir(root))
    except OSError as error:
        raise disk_error(
            f"cannot read the cache directory {root}: {error.strerror}; "
            f"allowed: a directory that FlexKV has used",
            error,
        ) from None
    matches = [match for name in names if (match := _FOLDER.fullmatch(name))]
    paths = [os.path.join(root, m.string) for m in matches if leftovers or not m["removed"]]
    return [path for path in paths if may_be_ours(path)]


def lock_folder(path: str, above: int | None = None) -> Folder | None:
    """Lock an existing folder, which the caller releases; None if another process owns it. `above`:
    descriptor of the cache directory; None to resolve the whole path. Raises OSError if a system
    call failed, or the lock file is another program's; FileNotFoundError if another process has
    removed the folder meanwhile."""
    folder = Folder(path, open_folder(path, above))
    try:
        folder.lock = _open_lock(folder)
        free = try_lock(folder.lock)
        if not is_at(path, folder.fd, above) or os.fstat(folder.lock).st_nlink == 0:
            # This is the lock of a removed folder. Another process may create the folder again.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not free:
            folder.release()
            return None
        # A folder with a table is FlexKV's, and a damaged lock there is worth nothing.
        known = _LOCK_CONTENT.fullmatch(os.pread(folder.lock, _LOCK_BYTES, 0))
        if not known and not has_table(folder.fd):
            raise OSError(errno.EEXIST, "is a file of another program", os.path.join(path, LOCK))
        os.ftruncate(folder.lock, 0)
        os.pwrite(folder.lock, _lock_content(), 0)
    except OSError:
        folder.release()
        raise
    close_in_children(folder)
    return folder


def _open_lock(folder: Folder) -> int:
    try:
        return open_regular(folder.fd, LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.path.join(folder.path, LOCK)) from None


def path_of(root: str, fingerprint: str, number: int) -> str:
    """The path of a folder: number 0 for the first engine with these blocks, 1 for the second."""
    return os.path.join(root, f"{fingerprint}-{number}" if number else fingerprint)


def claim(root: str, fingerprint: str, owners: int) -> Folder:
    """Lock the folder of `fingerprint` below the cache directory `root`, for the caller to release.
    Creates both if they are missing. If another process owns the first folder, the next one of
    `owners`, at most `MAX_OWNERS`, is used.

    Raises:
        UnavailableError: another process owns the folder, or a system call failed.
        DiskError: the folder cannot be created, or another user whom nobody has chosen owns it or
            can write to it, and can thus read and change blocks. The same holds for the cache
            directory and those above it; see `open_directory`.
    """
    try:
        with closing_fd(open_directory(root, mode_above=0o755)) as above:
            chosen = os.fstat(above)
            _refuse_others(root, chosen, stat.S_IWOTH)
            for number in range(owners):
                # Trying the next folder takes less time than waiting for this one.
                path = path_of(root, fingerprint, number)
                folder = _make(path, above, _TRIES if owners == 1 else 1)
                if folder is None:
                    continue
                try:
                    check_owner(folder, root, chosen.st_uid)
                except BaseException:
                    folder.release()
                    raise
                return folder
    except OSError as error:
        raise _unusable(root, error) from None
    raise UnavailableError(_taken(root, fingerprint, owners))


def check_root(root: str) -> bool:
    """Check that `claim` can use or create a cache directory, without a folder in it. Changes
    nothing. Returns whether the directory exists. Raises DiskError as `claim` does."""
    there = nearest_directory(root)
    try:
        with closing_fd(open_directory(there)) as above:
            status = os.fstat(above)
        # A folder that is there needs no right to make one.
        if there != root or not folders(root):
            check_creatable(root)
    except OSError as error:
        raise _unusable(root, error) from None
    if there == root:
        _refuse_others(root, status, stat.S_IWOTH)
    return there == root


def _unusable(root: str, error: OSError) -> DiskError:
    return disk_error(
        f"cannot use the cache directory {root} from ssd_cache_dir: {reason_of(error)}; allowed: a "
        f"directory that this user can create and write, and that no other user has made or can "
        f"replace",
        error,
    )


def has_table(folder: int) -> bool:
    """Whether an open directory holds a table of FlexKV of any version, damaged or not."""
    return table.has_magic(_first_pages_if_any(folder))


def has_blocks(folder: int) -> bool:
    """Whether an open directory holds files of blocks, as every cache does that has a table."""
    return is_regular(folder, slab_name(0))


def is_own(name: str) -> bool:
    """Whether a file in a folder of FlexKV is FlexKV's, by its name."""
    return name in _OWN_NAMES or is_slab(name)


def newer_version(folder: int) -> int | None:
    """The format version of the table in an open directory, if a newer FlexKV wrote it."""
    return table.newer_version(_first_pages_if_any(folder))


def first_pages(folder: int) -> bytes:
    """The first bytes of the table of an open directory. Raises OSError if the table cannot be
    read, is missing, or is no regular file."""
    with closing_fd(open_regular(folder, TABLE, os.O_RDONLY)) as fd:
        return os.pread(fd, table.HEADER_BYTES, 0)


def _first_pages_if_any(folder: int) -> bytes:
    """`first_pages`; empty if the directory has no regular file of this name."""
    try:
        return first_pages(folder)
    except FileNotFoundError:
        return b""
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            return b""
        raise


def disk_bytes(path: str) -> int:
    """Bytes that the files of a folder take on disk. Its owner may replace files meanwhile. Raises
    OSError if the folder cannot be read, or is gone."""
    total = 0
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_blocks * 512  # stat(2): units of 512
    return total


def _make(path: str, above: int, tries: int) -> Folder | None:
    """Lock the folder `path` in the open directory `above`. Creates it if it is missing. None if
    another process owns it after `tries` attempts."""
    for left in reversed(range(tries)):
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.basename(path), 0o700, dir_fd=above)
        # An engine with other blocks may remove the folder between these two calls.
        with contextlib.suppress(FileNotFoundError):
            folder = lock_folder(path, above)
            if folder is not None or not left:
                return folder
        time.sleep(_TRY_SECONDS)
    return None


def check_owner(folder: Folder, root: str, chosen: int) -> None:
    """Refuse a folder of a user whom nobody has chosen, as somebody has `chosen` the owner of the
    cache directory `root`. Raises DiskError if the folder is refused."""
    status = os.fstat(folder.fd)
    _refuse_others(folder.path, status, WRITABLE)
    if status.st_uid not in {os.geteuid(), chosen, *root_ids()}:
        raise DiskError(
            f"{folder.path} from ssd_cache_dir belongs to user {status.st_uid}, who can read and "
            f"change blocks there; allowed: a folder of this user, of root or of the owner of "
            f"{root}: remove it, or use another ssd_cache_dir"
        )


def may_be_ours(path: str, above: int | None = None) -> bool:
    """Whether a folder is FlexKV's, or this user cannot read it. The remains of a removal, whose
    table is gone, are FlexKV's by their name and because they hold nothing but the lock. A folder
    whose table is lost is FlexKV's by its files. `above` as in `lock_folder`."""
    remains = REMOVED in os.path.basename(path)
    try:
        with closing_fd(open_folder(path, above)) as folder:
            if has_table(folder):
                return True
            names = os.listdir(folder)
            lost = not any(_first_pages_if_any(folder)) and has_blocks(folder)
            ours = all(is_own(name) and is_regular(folder, name) for name in names)
            return (lost and ours) or (remains and names in ([], [LOCK]))
    except NotADirectoryError:
        return False
    except OSError as error:
        return error.errno != errno.ENOENT


def is_at(path: str, folder: int, above: int | None = None) -> bool:
    """Whether `path`, whose last component is in the open directory `above` if that is given, names
    the open directory `folder`."""
    name = path if above is None else os.path.basename(path)
    with contextlib.suppress(FileNotFoundError):
        there = os.stat(name, dir_fd=above, follow_symlinks=False)
        return os.path.samestat(there, os.fstat(folder))
    return False


def fingerprint_of(path: str) -> str:
    """The fingerprint in the name of the folder `path`; empty for any other name."""
    match = _FOLDER.fullmatch(os.path.basename(path))
    return match["fingerprint"] if match else ""


def _refuse_others(path: str, status: os.stat_result, writable: int) -> None:
    """Refuse a directory of another user, except root, to which further users can write by a bit of
    the mode in `writable`. Raises DiskError if the directory is refused."""
    if status.st_uid not in {os.geteuid(), *root_ids()} and status.st_mode & writable:
        raise DiskError(
            f"{path} from ssd_cache_dir belongs to user {status.st_uid}, and its mode "
            f"{stat.S_IMODE(status.st_mode):04o} lets others write there and change blocks; "
            f"allowed: a directory of this user or of root, or one that only its owner can write"
        )


def _taken(root: str, fingerprint: str, owners: int) -> str:
    path = os.path.join(root, fingerprint)
    if owners == MAX_OWNERS:
        return (
            f"all {MAX_OWNERS} folders {path}* from ssd_cache_dir are in use; allowed: "
            f"{MAX_OWNERS} engines of the same model and settings on one directory"
        )
    if owners > 1:
        return (
            f"the {owners} folders {path}* from ssd_cache_dir are in use, one of them by process "
            f"{describe_owner(path)}; allowed: one server with {owners} engines per directory, or "
            f"ssd_in_use=own, with which each engine has a cache of its own there"
        )
    return (
        f"{path} from ssd_cache_dir is in use by process {describe_owner(path)}; allowed: one "
        f"engine per directory, or ssd_in_use=own, with which each engine has a cache of its own "
        f"there"
    )


def close_to_others(folder: Folder) -> None:
    """Set a locked folder to mode 0700 and its files to 0600.

    If others could write there, they may have changed any block, and may still have files open. All
    files but the lock are then removed, so that the cache begins empty. Raises DiskError if others
    can still write to the folder; OSError if a system call failed.
    """
    fd = folder.fd
    names = [name for name in os.listdir(fd) if is_own(name) and is_regular(fd, name)]
    before = os.fstat(fd).st_mode
    for name in names:
        before |= os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
    if not before & OTHERS:
        return
    writable = before & WRITABLE
    _set_mode(fd, stat.S_IRWXU)
    now = os.fstat(fd).st_mode
    if now & WRITABLE:
        raise DiskError(
            f"{folder.path} from ssd_cache_dir keeps mode {stat.S_IMODE(now):04o}, which lets "
            f"others write there and change blocks: this user may not change the mode, or the file "
            f"system has none; allowed: a folder that only its owner can write (chmod go-w, or the "
            f"mount options umask=077 or dir_mode=0700,file_mode=0600)"
        )
    for name in names:
        if writable and name != LOCK:
            os.unlink(name, dir_fd=fd)
        else:
            with closing_fd(open_regular(fd, name, os.O_RDONLY)) as file:
                _set_mode(file, stat.S_IRUSR | stat.S_IWUSR)
    logger.warning(
        "other users could %s %s or its files (mode %04o); FlexKV %ssets the modes 0700 and 0600; "
        "keep them (no chmod; in Kubernetes, fsGroupChangePolicy: OnRootMismatch)",
        "write to" if writable else "read",
        folder.path,
        stat.S_IMODE(before) & (stat.S_IRWXU | OTHERS),
        "discards its blocks, which they may have changed, and " if writable else "",
    )


def _set_mode(fd: int, mode: int) -> None:
    # It fails for a folder of root's, for instance, or on a file system without modes.
    with contextlib.suppress(OSError):
        os.fchmod(fd, mode)


def _lock_content() -> bytes:
    """What an owner writes into the lock."""
    return f"{os.getpid()} {os.getppid()} {pid_namespace()}\n".encode()


def describe_owner(path: str) -> str:
    """The process id of the folder's owner as text, or "unknown"; with what a user must know to
    find and to judge it."""
    seen: int | None = None
    try:
        with closing_fd(open_folder(path)) as folder:
            with contextlib.suppress(Exception):  # without a list of locks, the content must do
                seen = owner_of(folder)
            pid, parent, namespace = _recorded(folder)
    except (OSError, ValueError):
        return str(seen or "unknown")
    if namespace != pid_namespace():
        own = process_text(pid, namespace)
        return f"{seen} ({own})" if seen else own
    if parent_of(pid) in (parent, None):
        return str(pid)
    return f"{pid}, whose parent process {parent} has died (end it if that was its server)"


def _recorded(folder: int) -> list[int]:
    """What `lock_content` has written. Raises OSError if the lock cannot be read; ValueError if it
    is damaged."""
    with closing_fd(open_regular(folder, LOCK, os.O_RDONLY)) as fd:
        ids = [int(each) for each in os.pread(fd, _LOCK_BYTES, 0).split()]
    if len(ids) != len(_lock_content().split()):
        raise ValueError("the lock is damaged")
    return ids


def owner_of(folder: int) -> int | None:
    """The process id of the engine that owns the open directory `folder`; None if no visible one
    does. Does not touch the lock: the kernel's list of locks has the processes of this PID
    namespace and of those below it. An engine in another container is missing. Raises OSError if
    the lock file or the list cannot be read."""
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
