# SPDX-License-Identifier: Apache-2.0
"""The calibrations that a user's cache folder keeps, and the lock of those who measure."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from flexkv.system.directories import open_directory
from flexkv.system.regular_files import closing_fd, open_regular
from flexkv_kernels.cuda_measure import Sample
from flexkv_kernels.cuda_options import CudaChoice, CudaMode, CudaOptions, Size

logger = logging.getLogger("flexkv.cuda")

LOCK_SECONDS = 60.0
"""Time limit for the lock. Measuring takes 1 to 3 s, and most nodes have eight ranks. Not tuned."""

_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result for a layout on a device.

    Attributes:
        mode: AUTO, or DMA if the kernels copy wrong bytes or could not be tried.
        choices: the way of each class.
        ring_bytes: bytes of the ring of each direction; 0 for the default.
        samples: all measurements.
        is_whole: whether all ways were correct and measured with all rings, so that the result is
            worth keeping.
    """

    mode: CudaMode = CudaMode.AUTO
    choices: tuple[CudaChoice, ...] = ()
    ring_bytes: int = 0
    samples: tuple[Sample, ...] = field(default=(), compare=False, repr=False)
    is_whole: bool = field(default=True, compare=False)

    def options(self, driver: str = "") -> CudaOptions:
        """Make the options of a mover. `driver`: path of the driver's library; "" for the
        system's."""
        return CudaOptions(self.mode, self.choices, ring_bytes=self.ring_bytes, driver=driver)


class _Saved(msgspec.Struct):
    """The content of a file."""

    made_for: list[str]
    mode: CudaMode
    choices: tuple[CudaChoice, ...]
    ring_bytes: Size
    samples: tuple[Sample, ...]


class CalibrationFile:
    """The file of a layout on a device of this machine.

    If the folder cannot be used, nothing is read, written or locked.

    Args:
        folder: folder of the cache; None for ``flexkv`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
        subject: names the device and the layout.
        made_for: all else that a calibration depends on. Another value discards the file.
    """

    def __init__(
        self, folder: Path | None, subject: Sequence[str], made_for: Sequence[str]
    ) -> None:
        self._folder = _cache_folder() if folder is None else folder
        self._host = _digest([platform.node()])
        self._name = f"cuda-calibration-{_digest([platform.node(), *subject])}.json"
        self._made_for = list(made_for)

    def read(self) -> Calibration | None:
        """The calibration; None if the file is missing, broken, planted by another user or made for
        something else."""
        try:
            with self._opened() as folder:
                file = open_regular(folder, self._name, os.O_RDONLY)
                with open(file, "rb") as content:
                    saved = msgspec.json.decode(content.read(), type=_Saved)
        except (OSError, ValueError, RecursionError):
            return None
        is_broken = any(choice.mode is CudaMode.AUTO for choice in saved.choices)
        if saved.made_for != self._made_for or is_broken:
            return None
        return Calibration(saved.mode, saved.choices, saved.ring_bytes, saved.samples)

    def write(self, found: Calibration) -> None:
        """Write the file so that readers see all of it or none. Failures are ignored."""
        saved = _Saved(self._made_for, found.mode, found.choices, found.ring_bytes, found.samples)
        temporary = f"{self._name}.{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with contextlib.suppress(OSError), self._opened() as folder:
            with open(open_regular(folder, temporary, flags), "wb") as file:
                file.write(msgspec.json.encode(saved))
            os.replace(temporary, self._name, src_dir_fd=folder, dst_dir_fd=folder)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let no other process of this user measure on this machine during the block: devices share
        memory and links. If another one holds the lock for too long, the block runs beside it."""
        lock = -1
        with contextlib.suppress(OSError), self._opened() as folder:
            name = f"cuda-calibration-{self._host}.lock"
            lock = open_regular(folder, name, os.O_RDWR | os.O_CREAT)
        try:
            if lock >= 0 and not _locked(lock):
                logger.warning(
                    "another process has measured copies for more than %.0f s; this one measures "
                    "beside it, so that both may see less speed; if that process hangs, end it",
                    LOCK_SECONDS,
                )
            yield
        finally:
            if lock >= 0:
                os.close(lock)

    def _opened(self) -> contextlib.AbstractContextManager[int]:
        if self._folder is None:
            raise FileNotFoundError("this user has no home")
        return closing_fd(open_directory(str(self._folder), mode_above=0o700))


def _cache_folder() -> Path | None:
    """The user's cache folder; None if this user has no home, as some containers' have."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "flexkv"
    except RuntimeError:
        return None


def _locked(descriptor: int) -> bool:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        except OSError:  # a file system without locks
            return True
        else:
            return True


def _digest(parts: Sequence[str]) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
