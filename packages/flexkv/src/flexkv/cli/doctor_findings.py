# SPDX-License-Identifier: Apache-2.0
"""What `flexkv doctor` finds, and how checks run: beside each other, and none longer than allowed.

A drive that hangs blocks the thread that asks it, for ever perhaps. So each check has a thread of
its own, and one that does not end is itself a finding.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


class Level(enum.Enum):
    """How much a finding matters."""

    OK = "ok"
    ADVICE = "advice"
    """FlexKV starts, and could do better."""
    PROBLEM = "problem"
    """A start would fail, or the cache would bring nothing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check.

    Attributes:
        check: the check's name.
        level: see `Level`.
        text: what is there.
        change: what to change; empty if nothing.
    """

    check: str
    level: Level
    text: str
    change: str = ""


Check = Callable[[], Iterable[Finding]]


def run_checks(checks: Mapping[str, Check], seconds: float) -> list[Finding]:
    """Findings of all checks, in the order of `checks`.

    Args:
        checks: by name.
        seconds: that each may take. A check that takes longer is left behind in its thread.
    """
    answers: queue.SimpleQueue[tuple[str, list[Finding]]] = queue.SimpleQueue()

    def run(name: str, check: Check) -> None:
        try:
            found = list(check())
        except Exception as error:  # noqa: BLE001 - a fault of one check must not hide the others
            text = f"could not be checked: {error!r}"
            found = [Finding(name, Level.ADVICE, text, "please report this error")]
        answers.put((name, found))

    for name, check in checks.items():
        threading.Thread(target=run, args=(name, check), daemon=True).start()
    ended: dict[str, list[Finding]] = {}
    deadline = time.monotonic() + seconds
    while len(ended) < len(checks):
        try:
            name, found = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        ended[name] = found
    return [finding for name in checks for finding in ended.get(name, [_unanswered(name, seconds)])]


def _unanswered(name: str, seconds: float) -> Finding:
    return Finding(
        name,
        Level.PROBLEM,
        f"no answer within {seconds:g} s",
        "the drive, the network or the driver behind it hangs; see the kernel's log (dmesg)",
    )
