# SPDX-License-Identifier: Apache-2.0
"""The sources of `flexkv top`: engines by their address, and cache directories.

Each source is asked by a thread of its own, so that a hung source delays no other.
"""

from __future__ import annotations

import functools
import os
import stat
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from flexkv.cli.common import cache_folders
from flexkv.cli.top_metrics import Reading, read_metrics
from flexkv.operators.ask_door import AskError
from flexkv.service.state import is_service, metrics_of
from flexkv.tiers.disk.files import reason_of
from flexkv.tiers.disk.inspect import FolderState, folder_state
from flexkv.types.deadline import call_within
from flexkv.types.errors import ConfigError, DiskError

_CALL_SECONDS = 5.0
"""Time limit for an engine's answer. Its `/metrics` may wait for a step of the engine."""

_SLOW_SECONDS = 3.0
"""The view mentions an attempt that lasts longer."""

_MOST_BYTES = 32 << 20
"""The most bytes of an answer; engines serve less than a megabyte."""

_ALLOWED = (
    "an engine's address, as http://HOST:PORT or HOST:PORT, the directory of a `flexkv serve`, or "
    "a cache directory (see an engine's ssd_cache_dir)"
)
_MOST_PORT = 65535

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs without the proxies of the environment, which lead out of the engines' network."""

Read = TypeVar("Read")


class SourceError(Exception):
    """A source gives no figures now. The message names the reason."""


@dataclass(slots=True)
class Look(Generic[Read]):
    """The outcome of the attempts so far. Never changed: each attempt makes a new one."""

    last: Read | None = None
    """The latest reading."""
    error: str | None = None
    """Message of the latest attempt's error; None if it succeeded."""
    since: float = 0.0
    """time.monotonic() of the first of the consecutive failures."""


class Source(Generic[Read]):
    """Asks a target again and again, in a thread of its own, which does not keep the process.
    `name` is the target as the user named it. `read` asks once, in the thread, and returns the
    figures, or raises SourceError or DiskError."""

    def __init__(self, name: str, read: Callable[[], Read]) -> None:
        self.name = name
        self.look: Look[Read] = Look()
        self._read = read
        self._asked = threading.Event()
        self._asked_at = 0.0
        self._ended = threading.Event()

    def start(self, interval: float) -> None:
        """Start the thread. It pauses `interval` seconds after each attempt."""
        thread = threading.Thread(target=self._run, args=(interval,), daemon=True)
        thread.start()

    def close(self) -> None:
        """Have the thread end after the attempt that runs."""
        self._ended.set()

    def wait(self, seconds: float) -> None:
        """Wait until the first attempt has ended, for at most `seconds` seconds."""
        self._asked.wait(seconds)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the running attempt began; 0 if none runs."""
        asked_at = self._asked_at
        return time.monotonic() - asked_at if asked_at else 0.0

    @property
    def is_silent(self) -> bool:
        """Whether the running attempt takes so long that the target may hang."""
        return self.silent_seconds > _SLOW_SECONDS

    @property
    def gives_figures(self) -> bool:
        """Whether the figures are current: the latest attempt succeeded, and the next one does not
        hang."""
        look = self.look
        return look.last is not None and look.error is None and not self.is_silent

    def _run(self, interval: float) -> None:
        while not self._ended.is_set():
            self._asked_at = time.monotonic()
            try:
                self.look = Look(self._read())
            except (SourceError, DiskError) as error:
                before = self.look
                since = time.monotonic() if before.error is None else before.since
                self.look = Look(before.last, str(error), since)
            self._asked_at = 0.0
            self._asked.set()
            self._ended.wait(interval)


def readers_of(targets: Sequence[str]) -> dict[str, Callable[[], Reading] | None]:
    """For each target of the command line, in their order, what reads the figures of the engine or
    the service; None for a cache directory. A path whose file system does not answer within a
    second counts as such a directory. Raises ConfigError if a target is none of these."""
    found = call_within({target: functools.partial(_reader, target) for target in targets}, 1.0)
    return {target: found.get(target) for target in targets}


def _reader(target: str) -> Callable[[], Reading] | None:
    if "://" in target:
        return functools.partial(scrape, address_of(target))
    try:
        mode = os.stat(target).st_mode
    except (FileNotFoundError, NotADirectoryError):
        host, colon, port = target.rpartition(":")
        if "/" not in target and host and colon and port.isdigit():
            return functools.partial(scrape, address_of(target))
        raise _refusal(target, "does not exist") from None
    except OSError as error:
        raise _refusal(target, f"cannot be read ({error.strerror})") from None
    if not stat.S_ISDIR(mode):
        raise _refusal(target, "is not a directory")
    return functools.partial(ask_service, target) if is_service(target) else None


def _refusal(target: str, problem: str) -> ConfigError:
    return ConfigError(f"{target!r} on the command line {problem}; allowed: {_ALLOWED}")


def address_of(target: str) -> str:
    """Make the URL of an engine's metrics from `HOST:PORT` or a URL. The default path is
    `/metrics`. Raises ConfigError if it is no address with http or https, or holds a password."""
    url = target if "://" in target else f"http://{target}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _refusal(target, f"has no port from 1 to {_MOST_PORT}") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            "a target on the command line holds a user or a password, which others on this "
            f"machine can read; allowed: {_ALLOWED}"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise _refusal(target, "is no address")
    path = parts.path if parts.path.strip("/") else "/metrics"
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{parts.netloc}{path}{query}"


def scrape(url: str) -> Reading:
    """Read the figures that an engine serves now at a URL of `address_of`. Raises SourceError if it
    does not answer, or serves no metrics of FlexKV."""
    at = time.monotonic()
    try:
        with _DIRECT.open(url, timeout=_CALL_SECONDS) as answer:
            data = answer.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        raise SourceError(f"answers {error.code} {error.reason}") from None
    except (OSError, ValueError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        reason = reason_of(cause) if isinstance(cause, OSError) else str(cause)
        raise SourceError(f"does not answer: {reason}") from None
    except Exception as error:  # noqa: BLE001 - of http.client, whose errors have no common base
        raise SourceError(f"answers with something else than HTTP: {error!r}") from None
    if len(data) > _MOST_BYTES:
        raise SourceError(f"answers with more than {_MOST_BYTES >> 20} MiB, which are no metrics")
    return _reading_of(data, at)


def ask_service(root: str) -> Reading:
    """Read the figures that the service in a directory has now. Raises SourceError if it does not
    answer."""
    at = time.monotonic()
    try:
        return _reading_of(metrics_of(root), at)
    except AskError as error:
        raise SourceError(str(error)) from None


def _reading_of(data: bytes, at: float) -> Reading:
    try:
        reading = read_metrics(data.decode(), at)
    except (ValueError, KeyError):
        raise SourceError("answers with something else than metrics") from None
    if reading is None:
        raise SourceError("serves no metrics of FlexKV")
    return reading


def read_folders(target: str) -> Sequence[FolderState]:
    """Read the figures of the folders of a cache directory. Waits as long as the directory does.
    Raises DiskError if it or a folder cannot be read, or it holds no cache."""
    return [folder_state(path) for path in cache_folders(target)]
