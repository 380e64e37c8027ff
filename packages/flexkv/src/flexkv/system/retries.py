# SPDX-License-Identifier: Apache-2.0
"""Work that is tried until it succeeds, such as the record of a reset."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

_MOST_DOUBLINGS = 64
"""No pause is doubled more often. Without a bound, the thread of the work would end by an
OverflowError: 1,025 failures, 5 s apart, are an outage of 85 minutes."""

_RETRY_SECONDS = 0.05
_LONGEST_RETRY_SECONDS = 5.0
"""The shortest and the longest pause between two tries."""


class Failures:
    """The failures in a row of work that is tried again: their `count` since the last success, and
    the `text` of the last one, empty after a success."""

    __slots__ = ("count", "text")

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        """Note a success."""
        self.count, self.text = 0, ""

    def note(self, error: Exception) -> bool:
        """Note a failure. Returns whether to log it: the first in a row, and each with another text
        than the failure before."""
        before, self.text = self.text, str(error) or repr(error)
        self.count += 1
        return self.text != before

    @property
    def pause(self) -> float:
        """Seconds to wait before the next try: each failure in a row doubles them, to a limit."""
        pause = _RETRY_SECONDS * 2.0 ** min(self.count - 1, _MOST_DOUBLINGS)
        return min(pause, _LONGEST_RETRY_SECONDS)


class Retried:
    """Work that a thread of its own does, again and again until it succeeds.

    Args:
        work: blocks, and raises if it fails.
        failed: logs a failure, given its text: the first in a row, each with another text than the
            failure before, and the last.
        at_close: whether work that is wanted at the end is tried at once, for the last time.
        most_tries: failures in a row after which the work is given up; None for no bound.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], None],
        failed: Callable[[str], None],
        *,
        at_close: bool,
        most_tries: int | None = None,
    ) -> None:
        self._name = name
        self._do = work
        self._failed = failed
        self._at_close = at_close
        self._most_tries = math.inf if most_tries is None else most_tries
        self._work = threading.Condition()
        self._wanted = False
        self._closing = False
        self._tried = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Do the work; if it is being done, do it once more. Does not wait."""
        with self._work:
            self._wanted = True
            if self._thread is None:
                # A daemon: a thread that hangs must not keep the process from ending.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._work.notify()

    def await_try(self, seconds: float) -> bool:
        """Wait until the work was tried once, or for `seconds`. Returns whether it was tried."""
        return self._tried.wait(seconds)

    def begin_close(self) -> None:
        """End the thread, after the last try if there is one. Does not wait."""
        with self._work:
            self._closing = True
            self._work.notify()

    def close(self, timeout: float) -> bool:
        """Wait for the thread, for `timeout` seconds at most. Returns whether it has ended."""
        self.begin_close()
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    @property
    def _gives_up(self) -> bool:
        return self._closing and not self._at_close

    def _run(self) -> None:
        failures = Failures()
        while True:
            with self._work:
                if failures.count and not self._closing:
                    self._work.wait(failures.pause)
                while not (self._wanted or self._closing):
                    self._work.wait()
                if not self._wanted or self._gives_up:
                    return
                self._wanted, last = False, self._closing
            try:
                self._do()
                failures.end()
            except Exception as error:  # noqa: BLE001
                # Whatever it is: the work would never be done.
                is_new = failures.note(error)
                self._wanted = not last and failures.count < self._most_tries
                if (is_new or last) and not self._gives_up:
                    self._failed(failures.text)
            self._tried.set()
