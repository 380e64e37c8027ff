# SPDX-License-Identifier: Apache-2.0
"""Records an engine's requests for `flexkv plan`: digests of blocks and lengths, no text.

Each start of an engine writes a head, then one JSON object per line. It draws a new salt for the
digests, which are the names of blocks, and stores it nowhere. Equal names therefore mean equal
prefixes only behind the same head, and no reader can check whether a known text was sent.

A thread makes the digests and writes them. The scheduler only passes on names and numbers that it
already has.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import queue
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flexkv.settings import GIB, CacheConfig
from flexkv.system.directories import check_creatable, lasts, open_directory
from flexkv.system.forks import close_in_children
from flexkv.system.retries import Retried

logger = logging.getLogger(__name__)

VERSION = 1
"""Version of the format. A parser refuses all others."""

HEAD = "flexkv_trace"
"""The key of a head, with the version of the format. A head also has `engine`, `block_tokens`,
`block_bytes` and `began`, in seconds since 1970."""

TIME, PROMPT, OUTPUT = "t", "in", "out"
"""Keys of a request: when it was scheduled, in seconds since `began`; tokens of the prompt; tokens
of the answer."""
ENGINE_HIT, HIT = "own", "hit"
"""Keys of a request: prompt tokens in the engine's own cache; prompt tokens that FlexKV loaded."""
BLOCKS = "blocks"
"""Key of a request: the concatenated names of the complete blocks of prompt and answer."""
SESSION = "session"
"""Key of a request: a digest of the name of its conversation; missing if unknown."""
PREFILL = "prefill"
"""Key of a line of its own: seconds to compute a token and a pair of tokens, as measured so far."""

NAME_DIGITS = 16
"""Hexadecimal digits of a name."""

_SALT_BYTES = 32
_BUFFER_BYTES = 1 << 16
_FLUSH_SECONDS = 2.0
"""The buffer is written when it has as many bytes, or when no request has come for as long."""
_CLOSE_SECONDS = 2.0
"""Seconds that `close` waits for the thread."""

_OPEN_SECONDS = 1.0
"""Seconds that a start waits until the file is open."""
_OPEN_TRIES = 720
"""Failures in a row after which the file is given up: about an hour at the longest pause of
`Retried`."""

_KEYS_A_TURN = 64
_PAUSE_SECONDS = 0.0001
"""The thread holds the interpreter for about 0.07 ms at a time and then pauses, so the scheduler
waits no longer for it. It takes about 220,000 keys of 32 bytes a second. Both were measured with
the loop of `_digests` alone, on one core of a Xeon."""

_MOST_WAITING = 1 << 20
"""The most names of blocks that wait for the thread, about 100 MB. Requests beyond are left out and
counted."""

_MOST_RUNNING = 1 << 16
"""The most running requests that are kept. Beyond, the oldest is dropped, because an engine may
never report its end."""

_PREFILL_REQUESTS = 64
"""Requests between two lines with the measured cost of computing."""

Names = Callable[[], Iterable[bytes]]
"""Returns the names of a request's blocks, first block first. Called in another thread."""


@dataclass(slots=True)
class _Recorded:
    """A request; see `Recorder.scheduled`, and `Recorder.ended` for the last three."""

    began: float
    prompt_tokens: int
    own_tokens: int
    hit_tokens: int
    session: str
    output_tokens: int = 0
    blocks: int = 0
    names: Names = tuple


class Recorder:
    """Records the requests of one engine to a file. `open_recorder` makes it.

    One thread calls `scheduled` and `ended`, which never wait or raise. If the file cannot be
    opened, the recorder retries in the background, and records the requests that are scheduled
    later. After an error of a write, or when the file is full, it logs one message and records
    nothing more. `prefill` returns the seconds to compute a token and a pair of tokens; None until
    they are measured.
    """

    def __init__(
        self,
        path: str,
        limit: int,
        head: dict[str, object],
        prefill: Callable[[], tuple[float, float] | None],
    ) -> None:
        self._path = path
        self._fd = -1
        self._size = 0
        self._limit = limit
        self._prefill = prefill
        self._salt = secrets.token_bytes(_SALT_BYTES)
        self._start = time.monotonic()
        self._running: dict[str, _Recorded] = {}
        self._queue: queue.SimpleQueue[_Recorded | tuple[float, float] | None] = queue.SimpleQueue()
        self._given = self._taken = self._requests = self._left_out = 0
        self._off = True  # until the file is open
        self._buffer = bytearray(_line(head))
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = self._refused = False
        self._opening = Retried(
            "flexkv-trace-open",
            self._open,
            self._log_failure,
            at_close=False,
            most_tries=_OPEN_TRIES,
        )
        self._opening.begin()
        close_in_children(self)

    @property
    def active(self) -> bool:
        """Whether requests are recorded."""
        return not self._off

    def await_open(self, seconds: float) -> bool:
        """Wait for the first try to open the file, at most so many seconds. Returns False if no try
        can succeed until somebody changes the file or the setting."""
        self._opening.await_try(seconds)
        return not self._refused

    def scheduled(
        self, request_id: str, prompt_tokens: int, own_tokens: int, hit_tokens: int, session: str
    ) -> None:
        """Record that the engine gave blocks to a request. If the engine preempts the request and
        schedules it again, only the first time counts.

        Args:
            own_tokens: tokens of the prompt in the engine's own cache.
            session: name of its conversation; empty if unknown. Only a digest of it is written.
        """
        if self._off or request_id in self._running:
            return
        if len(self._running) >= _MOST_RUNNING:
            del self._running[next(iter(self._running))]
        began = time.monotonic() - self._start
        self._running[request_id] = _Recorded(began, prompt_tokens, own_tokens, hit_tokens, session)

    def ended(self, request_id: str, output_tokens: int, blocks: int, names: Names) -> None:
        """Record that a request has ended. Does nothing if the request was not scheduled.

        Args:
            blocks: the number of complete blocks of its prompt and its answer.
            names: returns the names of these blocks. A name need only differ from those of other
                blocks behind the same prefix.
        """
        recorded = self._running.pop(request_id, None)
        if self._off or recorded is None:
            return
        if self._given - self._taken + blocks > _MOST_WAITING:
            self._left_out += 1
            return
        self._given += blocks
        recorded.output_tokens, recorded.blocks, recorded.names = output_tokens, blocks, names
        self._queue.put(recorded)
        self._requests += 1
        if self._requests % _PREFILL_REQUESTS == 1:
            measured = self._prefill()
            if measured is not None:
                self._queue.put(measured)

    def close(self) -> None:
        """Write waiting requests for at most two seconds, and close the file. Idempotent."""
        with self._lock:
            self._closed = True
        self._opening.close(_CLOSE_SECONDS)
        if self._thread is not None and self._thread.is_alive():
            measured = self._prefill()
            if measured is not None:
                self._queue.put(measured)
            self._queue.put(None)
            self._thread.join(_CLOSE_SECONDS)
        self._off = True

    def leave_to_parent(self) -> None:
        """See `forks.Owner`. A forked child has no thread, so it records nothing."""
        self._off = True
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)

    def _open(self) -> None:
        """Open the file and begin to write. Raises OSError, with the reason alone as its text, if
        the file cannot be used; RuntimeError if the system has no thread for the recorder."""
        try:
            fd = _open(self._path)
        except OSError as error:
            self._refused = lasts(error)
            raise OSError(error.strerror or str(error)) from None
        try:
            with self._lock:
                if self._closed:
                    raise OSError("closed")
                self._fd, self._size = fd, os.fstat(fd).st_size
                thread = threading.Thread(target=self._run, name="flexkv-trace", daemon=True)
                self._off = False
                thread.start()
                self._thread = thread
        except BaseException:
            self._off, self._fd = True, -1
            os.close(fd)
            raise
        logger.info(
            "FlexKV records digests and lengths of requests to %s, up to %g GiB",
            self._path,
            self._limit / GIB,
        )

    def _log_failure(self, text: str) -> None:
        if self._refused:
            self._opening.begin_close()
        logger.warning(
            "cannot record to %s from trace: %s; nothing is recorded%s; allowed: a new file, or a "
            "recording that only this user can read and no other engine writes",
            self._path,
            text,
            "" if self._refused else " until it can; FlexKV retries for about an hour",
        )

    def _run(self) -> None:
        try:
            self._write_all()
        except OSError as error:
            self._stop(f"{error.strerror or error}; nothing more is recorded")
        except Exception as error:  # noqa: BLE001 - the names are an engine's
            self._stop(f"a request cannot be described: {error!r}; nothing more is recorded")
        finally:
            self._off = True
            os.close(self._fd)

    def _write_all(self) -> None:
        self._flush()
        while True:
            try:
                item = self._queue.get(timeout=_FLUSH_SECONDS)
            except queue.Empty:
                self._flush()
                continue
            if item is None:
                break
            self._buffer += self._line_of(item)
            if len(self._buffer) >= _BUFFER_BYTES:
                self._flush()
            if self._off:
                return
        self._flush()
        if self._left_out:
            logger.warning(
                "%d requests are not in the trace %s, because they ended faster than FlexKV wrote "
                "them",
                self._left_out,
                self._path,
            )

    def _line_of(self, item: _Recorded | tuple[float, float]) -> bytes:
        if isinstance(item, tuple):
            return _line({PREFILL: list(item)})
        line: dict[str, object] = {
            TIME: round(item.began, 6),
            PROMPT: item.prompt_tokens,
            OUTPUT: item.output_tokens,
            ENGINE_HIT: item.own_tokens,
            HIT: item.hit_tokens,
            BLOCKS: self._digests(item),
        }
        if item.session:
            line[SESSION] = self._digest(item.session.encode())
        self._taken += item.blocks
        return _line(line)

    def _digests(self, item: _Recorded) -> str:
        digests = []
        for name in item.names():
            digests.append(self._digest(name))
            if len(digests) % _KEYS_A_TURN == 0:
                time.sleep(_PAUSE_SECONDS)
        return "".join(digests[: item.blocks])

    def _digest(self, data: bytes) -> str:
        size = NAME_DIGITS // 2
        return hashlib.blake2b(data, digest_size=size, key=self._salt).hexdigest()

    def _flush(self) -> None:
        """Write the lines in the buffer. If a write fails, the file has none of them."""
        if not self._buffer or self._off:
            return
        if self._size + len(self._buffer) > self._limit:
            self._stop(
                f"it has {self._size} bytes, and trace_gb leaves no room for more; nothing more is "
                f"recorded; raise trace_gb, or name a new file"
            )
            return
        left = memoryview(self._buffer)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(self._buffer)
        self._buffer = bytearray()

    def _stop(self, reason: str) -> None:
        self._off = True
        logger.warning("the trace %s: %s", self._path, reason)


def open_recorder(
    config: CacheConfig,
    engine: str,
    block_tokens: int,
    block_bytes: int,
    prefill: Callable[[], tuple[float, float] | None],
) -> Recorder | None:
    """Open a recorder to the file that the setting `trace` names, which the caller closes. None if
    it is not set, or if the file cannot be used until somebody changes it, which is logged.

    Args:
        block_bytes: bytes of a block over all ranks.
        prefill: see `Recorder`.
    """
    if config.trace is None:
        return None
    head: dict[str, object] = {
        HEAD: VERSION,
        "engine": engine,
        "block_tokens": block_tokens,
        "block_bytes": block_bytes,
        "began": round(time.time(), 3),
    }
    recorder = Recorder(config.trace, int(config.trace_gb * GIB), head, prefill)
    if recorder.await_open(_OPEN_SECONDS):
        return recorder
    recorder.close()
    return None


def check_trace(path: str) -> bool:
    """Check that a recorder could write to a file, and raise as `_open` does if not. Changes
    nothing."""
    try:
        fd = _open(path, create=False)
    except FileNotFoundError:
        if not os.path.isdir(os.path.dirname(path)):  # a recorder creates none
            raise
        check_creatable(path)
        return False
    os.close(fd)
    return True


def _open(path: str, *, create: bool = True) -> int:
    """Open a new file, or a recording at its end. Refuses symbolic links, files that are not
    regular, files that other users own or can read, and files that another process records to. The
    directory must not be another user's trap; see `open_directory`. Without `create`, changes
    nothing. Returns the descriptor, which holds the lock of the file and which the caller closes.
    Raises OSError if the file cannot be used."""
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    flags |= os.O_CREAT if create else 0
    try:
        folder = open_directory(os.path.dirname(path))
    except OSError as error:
        raise OSError(error.errno, f"{error.filename}: {error.strerror}") from None
    try:
        fd = os.open(os.path.basename(path), flags, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if status.st_uid != os.geteuid():
            raise OSError(errno.EPERM, "another user's file")
        if status.st_mode & 0o077 or status.st_nlink != 1:
            raise OSError(errno.EPERM, "others can read it, or it has a second name")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EAGAIN, "another engine records to it") from None
        _check_head(fd, status.st_size)
        if create:
            _repair(fd, status.st_size)
        return fd
    except BaseException:
        os.close(fd)
        raise


def _check_head(fd: int, size: int) -> None:
    """Raises OSError if the file is no recording of FlexKV."""
    start = b'{"%s"' % HEAD.encode()
    if size and os.pread(fd, len(start), 0) != start:
        raise OSError(errno.EEXIST, "a file that is no recording of FlexKV")


def _repair(fd: int, size: int) -> None:
    """Remove an incomplete last line, which a killed engine leaves."""
    end = size
    while end:
        begin = max(0, end - _BUFFER_BYTES)
        place = os.pread(fd, end - begin, begin).rfind(b"\n")
        if place >= 0:
            end = begin + place + 1
            break
        end = begin
    if end < size:
        os.ftruncate(fd, end)


def _line(content: dict[str, object]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"
