# SPDX-License-Identifier: Apache-2.0
"""Opens the drive of a cache directory in the background, again and again until that works.

At a start, the mount or the drive of a directory may hang or fail, or the engine before may still
have its folder. The engine then starts without it, and uses it from the moment on at which it is
open. A try that fails keeps no folder: other engines may have it meanwhile.

Beside its blocks, a folder has the parts of its fingerprint as text, one `NAME: VALUE` a line. No
block depends on that file. It lets an engine that begins empty name the parts that differ from
those of a folder with blocks.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from flexkv.index.ages import BlockAges
from flexkv.system.regular_files import closing_fd, open_regular
from flexkv.system.retries import Retried
from flexkv.tiers.base import States
from flexkv.tiers.circuit import CircuitState
from flexkv.tiers.disk.disk_store import DiskStore, bytes_of, check_table
from flexkv.tiers.disk.drive import THREADS, WRITE_BYTES, Drive
from flexkv.tiers.disk.files import OsFiles, disk_error, open_folder, reason_of
from flexkv.tiers.disk.folder import (
    IDENTITY,
    Folder,
    claim,
    close_to_others,
    fingerprint_of,
    folders,
)
from flexkv.tiers.disk.ledger import load_ledger
from flexkv.tiers.disk.removal import check_room, make_room, remove_others
from flexkv.tiers.link import Link
from flexkv.types.deadline import HANGS, call_within
from flexkv.types.errors import DiskError, UnavailableError

logger = logging.getLogger(__name__)

HANG_SECONDS = 5.0
"""Seconds without one more slot read after which a drive hangs. Not tuned."""

CLOSE_SECONDS = 1.0
"""Seconds that `Opening.close` waits for a try under way. Not tuned."""

_REPORTS = 4
"""Lines that report how many slots are read, at equal distances."""

_COMPARE_SECONDS = 1.0
"""Time limit for the directories' answers. Directories that do not answer are not compared with the
others. Not tuned."""

_IDENTITY_BYTES = 8192
"""The most bytes of the file, two pages of the folder's bound."""

_MODEL_PARTS = ("weights", "configuration")
"""Names of the parts by which two folders are of one model; see `flexkv.engine.weights`."""

_VALUE_CHARACTERS = 60
"""The most characters of a value in the log."""


class RealPath(NamedTuple):
    """The path of a directory without symbolic links, and the number of the file system that it is
    on, or will be on once it is created."""

    path: str
    device: int


@dataclass(frozen=True, slots=True)
class DriveSpec:
    """What a drive is opened with; see `open_disk_tier`. Bytes are those of its directory alone;
    `name` is the prefix of the names of its threads."""

    root: str
    name: str
    fingerprint: str
    slot_bytes: int
    capacity: int
    owners: int
    keep_others: bool
    day_bytes: int | None
    queue_bytes: int
    stall_seconds: float
    files: OsFiles
    identity: Sequence[str]
    ages: BlockAges | None


class Opening:
    """The drive of one directory until it is open. Its thread opens the drive; all methods are for
    one other thread. Only those that say so wait. Owns `states`, which report to other processes
    that the drive is not open yet. `cleared` and `emptied`: whether there was a reset, so that the
    drive must be cleared or emptied before it is used."""

    def __init__(self, spec: DriveSpec, states: States | None) -> None:
        self.root = spec.root
        self.cleared = self.emptied = False
        self._spec = spec
        self._states = states
        self._lock = threading.Lock()
        self._drive: Drive | None = None
        self._error: DiskError | None = None  # of the last try
        self._accepted = self._reported = self._closed = self._hangs = False
        self._progress = (0, 0)  # slots that were read, and all; zeros while none is being read
        self._moved = 0.0  # when a slot was read
        self._checked = threading.Event()
        self._allowed = threading.Event()
        self._opening = Retried(f"{spec.name}-open", self._open, self._log, at_close=False)
        self._opening.begin()

    @property
    def drive(self) -> Drive | None:
        """The drive once it is open. The caller who takes it from here owns it."""
        return self._drive

    @property
    def refusal(self) -> DiskError | None:
        """The error of the last try if it lasts until somebody changes a setting or a file."""
        error = self._error
        return None if isinstance(error, UnavailableError) else error

    def await_check(self, seconds: float) -> None:
        """Wait until the first try has taken the folder and found nothing against its use, or has
        failed; at most so many seconds."""
        self._checked.wait(seconds)

    def allow(self) -> None:
        """Let tries allocate and remove files from now on."""
        self._allowed.set()

    def await_try(self, seconds: float) -> None:
        """Wait for the end of the first try, at most so many seconds."""
        self._opening.await_try(seconds)

    def accept(self, waited: float) -> None:
        """Report from now on that the drive is not open, unless it is; and log a try that has not
        ended `waited` seconds after it began. A large directory takes long and does not hang.
        Before, a refusal is the caller's. Raises DiskError if the directory is refused."""
        with self._lock:
            if self._drive is not None:
                return
            if self.refusal is not None:
                raise self.refusal
            self._accepted = True
            if self._states is not None:
                self._reported = True
                shown = dict.fromkeys(("reads", "writes"), CircuitState.CONNECTING.value)
                self._states.begin(lambda: shown)
        if self._opening.await_try(0.0):
            return
        if not self._checked.is_set():
            self._log_hang(waited)
            return
        read, slots = self._progress
        logger.warning(
            "%s from ssd_cache_dir is not open after %g s (%s); FlexKV starts without it and uses "
            "it once it is open",
            self.root,
            waited,
            f"{read} of {slots} slots are read" if slots else "its files are being made or opened",
        )

    def look(self) -> None:
        """Log a drive that hangs while it is read. Call now and then."""
        read, slots = self._progress
        idle = time.monotonic() - self._moved
        if read < slots and idle >= HANG_SECONDS and not self._hangs:
            self._hangs = True
            self._log_hang(idle)

    def reset(self, drive: Drive) -> None:
        """Do to the drive, now that it is open, what was asked for before."""
        if self.cleared:
            drive.clear()
        elif self.emptied:
            drive.empty()

    def begin_close(self) -> None:
        """Give the directory up. A try under way leaves nothing open. Idempotent."""
        with self._lock:
            self._closed = True
        self._opening.begin_close()
        self._allowed.set()

    def close(self) -> None:
        """Call `begin_close`, wait up to `CLOSE_SECONDS` for a try under way, and close a drive
        that nobody has taken."""
        self.begin_close()
        ended = self._opening.close(CLOSE_SECONDS)
        if self._drive is not None:
            self._end(self._drive)
        elif self.cleared or self.emptied:
            logger.error(
                "the reset of the caches in %s is recorded nowhere, because the directory was "
                "never open; remove its folder of %s before the next start: it may have blocks "
                "from before the reset",
                self.root,
                self._spec.fingerprint,
            )
        if ended:
            self._end_report()

    def _log_hang(self, seconds: float) -> None:
        logger.error(
            "%s from ssd_cache_dir has not answered for %g s; FlexKV goes on without it and uses "
            "it once it answers: %s",
            self.root,
            seconds,
            HANGS,
        )

    def _advance(self, read: int, slots: int) -> None:
        before = self._progress[0]
        self._hangs, self._moved, self._progress = False, time.monotonic(), (read, slots)
        if self._accepted and read * _REPORTS // slots > before * _REPORTS // slots:
            logger.info("%s: %d of %d slots are read", self.root, read, slots)

    def _open(self) -> None:
        try:
            drive = self._open_drive()
        except DiskError as error:
            self._error = error.with_traceback(None)
            raise
        finally:
            self._progress = (0, 0)
            self._checked.set()
        self._opening.begin_close()  # the thread has nothing more to do
        with self._lock:
            if not self._closed:
                self._drive = drive
        if self._drive is None:
            self._end(drive)
            return
        self._end_report()
        if self._accepted:
            logger.info(
                "%s is open now; FlexKV keeps blocks there: %d of %d slots are warm",
                drive.path,
                len(drive.index),
                drive.index.num_slots,
            )

    def _open_drive(self) -> Drive:
        """Open the drive. Raises DiskError if it cannot be opened. Nothing is left open."""
        spec = self._spec
        try:
            with contextlib.ExitStack() as undo:
                folder = _claim(spec)
                undo.callback(folder.release)
                size = bytes_of(spec.capacity, spec.slot_bytes)
                check_room(spec.root, folder.path, size, spec.owners, spec.capacity)
                self._checked.set()
                self._allowed.wait()
                if self._closed:
                    raise UnavailableError(f"{spec.root} was given up")
                make_room(spec.root, folder.path, size, spec.owners)
                store = DiskStore(
                    spec.files,
                    folder,
                    spec.fingerprint,
                    spec.slot_bytes,
                    spec.capacity,
                    ages=spec.ages,
                    claim=partial(_claim, spec, again=True),
                    progress=self._advance,
                )
                undo.callback(store.close)
                if not len(store.index):
                    report_differences(spec.root, spec.identity, spec.fingerprint)
                save_identity(folder.fd, spec.identity)
                if not store.direct:
                    logger.warning(
                        "%s does not support direct I/O; blocks go through the page cache",
                        spec.root,
                    )
                if not spec.keep_others:
                    remove_others(spec.root, folder.path, spec.owners)
                drive = _drive_of(store, spec)
                undo.pop_all()
                return drive
        except OSError as error:
            raise disk_error(
                f"cannot use {spec.root} from ssd_cache_dir: {reason_of(error)}; allowed: a "
                f"directory that this user can create, read and write",
                error,
            ) from None

    def _log(self, problem: str) -> None:
        with self._lock:
            # Else the start fails and names it.
            said = self._accepted or self.refusal is None
        if said:
            logger.error(
                "%s; FlexKV goes on without this directory, retries at least every 5 s, and uses "
                "it once it is open",
                problem,
            )

    def _end(self, drive: Drive) -> None:
        """Close a drive that nobody uses."""
        self.reset(drive)
        drive.close()

    def _end_report(self) -> None:
        if self._states is not None and self._reported:
            self._states.close()


def _claim(spec: DriveSpec, *, again: bool = False) -> Folder:
    """Claim the folder of a drive, and check that it may be used. `again`: while the engine runs.
    Raises DiskError or OSError if it may not be used now."""
    folder = claim(spec.root, spec.fingerprint, spec.owners)
    try:
        check_table(folder)
        close_to_others(folder)
        if again:
            save_identity(folder.fd, spec.identity)
    except BaseException:
        folder.release()
        raise
    return folder


def _drive_of(store: DiskStore, spec: DriveSpec) -> Drive:
    # At least two blocks: the checksum of one is computed while the other is written.
    write_bytes = max(WRITE_BYTES, 2 * spec.slot_bytes)
    link = Link(spec.name, THREADS, write_bytes, spec.queue_bytes, spec.stall_seconds)
    try:
        return Drive(store, link, spec.day_bytes)
    except BaseException:
        link.begin_close(0.0)
        raise


def places_of(roots: Sequence[str]) -> dict[str, RealPath]:
    """The places of those directories that answer within a second."""
    # A mount that hangs lets realpath(3) hang, and a start goes on without it.
    return call_within({root: partial(_place, root) for root in roots}, _COMPARE_SECONDS)


def check_apart(places: Mapping[str, RealPath]) -> None:
    """Raises DiskError if two directories are one, or one lies in the other on the same file
    system."""
    for (root, upper), (other, lower) in itertools.permutations(places.items(), 2):
        same = upper.path == lower.path
        within = os.path.commonpath([upper.path, lower.path]) == upper.path
        if same or (within and upper.device == lower.device):
            how = "is the same directory as" if same else "lies in"
            raise DiskError(
                f"{other} from ssd_cache_dir {how} {root}; allowed: directories apart from each "
                f"other, each on a drive of its own"
            )


def _place(root: str) -> RealPath:
    path = os.path.realpath(root)
    there = path
    while True:
        try:
            return RealPath(path, os.stat(there).st_dev)
        except OSError:
            if there == "/":
                return RealPath(path, -1)
            there = os.path.dirname(there)


def save_identity(folder: int, identity: Iterable[str]) -> None:
    """Write the parts, each `NAME: VALUE`, into the open directory `folder`, which this process
    owns. If the system refuses, there is no file."""
    lines = "".join(" ".join(part.split()) + "\n" for part in identity)
    if not lines:
        return
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(IDENTITY, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with closing_fd(open_regular(folder, IDENTITY, flags)) as fd:
            os.write(fd, lines.encode(errors="replace")[:_IDENTITY_BYTES])


def report_differences(root: str, identity: Sequence[str], fingerprint: str) -> None:
    """Log which parts of the fingerprint keep an engine from the blocks of its model below `root`:
    those of the folder that differs in the fewest parts. `identity`: the parts of the engine's
    `fingerprint`. Raises DiskError if `root` cannot be read."""
    ours = _parts(identity)
    nearest: tuple[str, dict[str, str]] | None = None
    for path in folders(root):
        if fingerprint_of(path) == fingerprint:
            continue
        # A folder that cannot be read is another user's.
        with contextlib.suppress(OSError):
            theirs = _read_identity(path)
            if not any(ours.get(name, "") == theirs.get(name) for name in _MODEL_PARTS):
                continue
            if nearest is None or len(_differing(ours, theirs)) < len(_differing(ours, nearest[1])):
                nearest = path, theirs
    if nearest is not None:
        path, theirs = nearest
        same = theirs.get("weights") == ours.get("weights")
        logger.warning(
            "%s begins empty, but %s has blocks of %s under another fingerprint; what differs: %s",
            os.path.join(root, fingerprint),
            path,
            "this model" if same else "a model of this configuration",
            "; ".join(
                f"{name} ({_shown(theirs, name)} there, {_shown(ours, name)} here)"
                for name in _differing(ours, theirs)
            ),
        )


def _read_identity(path: str) -> dict[str, str]:
    """The parts of a folder that has been written to; empty for any other. Raises OSError if the
    folder cannot be read."""
    with closing_fd(open_folder(path)) as folder:
        if not load_ledger(folder).written_blocks:
            return {}
        with closing_fd(open_regular(folder, IDENTITY, os.O_RDONLY)) as fd:
            text = os.pread(fd, _IDENTITY_BYTES, 0).decode(errors="replace")
    return _parts(text.splitlines())


def _parts(identity: Iterable[str]) -> dict[str, str]:
    named = (part.partition(": ") for part in identity)
    return {name: " ".join(value.split()) for name, colon, value in named if colon}


def _differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    return [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]


def _shown(parts: Mapping[str, str], name: str) -> str:
    value = parts.get(name)
    return "not set" if value is None else repr(value[:_VALUE_CHARACTERS])
