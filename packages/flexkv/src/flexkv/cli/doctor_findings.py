# SPDX-License-Identifier: Apache-2.0
"""What `flexkv doctor` finds. Checks run side by side; one that does not end is a finding too."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flexkv.deadline import HANGS, call_within


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
    calls = {name: functools.partial(_run, name, check) for name, check in checks.items()}
    ended = call_within(calls, seconds)
    return [finding for name in checks for finding in ended.get(name, [unanswered(name, seconds)])]


def _run(name: str, check: Check) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:  # noqa: BLE001 - a fault of one check must not hide the others
        text = f"could not be checked: {error!r}"
        return [Finding(name, Level.ADVICE, text, "please report this error")]


def unanswered(name: str, seconds: float) -> Finding:
    """The finding about a check that did not end within so many seconds."""
    return Finding(
        name,
        Level.PROBLEM,
        f"no answer within {seconds:g} s",
        HANGS,
    )
