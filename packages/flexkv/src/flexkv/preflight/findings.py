# SPDX-License-Identifier: Apache-2.0
"""Checks and what they find. Checks run side by side; one that does not end is a finding, too."""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flexkv.types.deadline import HANGS, call_within
from flexkv.types.errors import FlexKVError, UnavailableError

logger = logging.getLogger(__name__)


class Level(enum.Enum):
    """The importance of a finding. The values are those of the output."""

    OK = "ok"
    """Nothing needs a change."""
    ADVICE = "advice"
    """FlexKV starts. A change could make it better."""
    PROBLEM = "problem"
    """A start would fail, or the cache would be of no use."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check: the state that it found, and the change that the user should make,
    which is empty if none is needed."""

    check: str
    level: Level
    text: str
    change: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A check of what a start needs."""

    name: str
    """The first word of the output."""
    find: Callable[[], Iterable[Finding]] = tuple
    """Finds what is to be said. It may raise the `FlexKVError` of a start, which is a problem."""
    refuse: Callable[[], object] | None = None
    """The part that every start makes, too, before `find`. It raises the `FlexKVError` that the
    start would raise later, and takes milliseconds unless a file system hangs."""


def run_checks(checks: Sequence[Check], seconds: float) -> list[Finding]:
    """Run all checks side by side, each in a thread of its own. An exception of a check becomes a
    finding. A check that takes longer than `seconds` for all together is left behind in its thread,
    which does not keep the process."""
    calls = {each.name: functools.partial(_run, each) for each in checks}
    ended = call_within(calls, seconds)
    return [
        finding
        for each in checks
        for finding in ended.get(each.name, [unanswered(each.name, seconds)])
    ]


def refuse_start(checks: Sequence[Check], seconds: float) -> None:
    """Make the parts of `checks` that can refuse a start, side by side, and raise the first
    FlexKVError. A start goes on after an `UnavailableError`, and without what has not answered
    after `seconds` for all together."""
    calls = {each.name: functools.partial(_refusal, each) for each in checks if each.refuse}
    for error in call_within(calls, seconds).values():
        if error is not None:
            raise error


def problem_of(name: str, error: FlexKVError) -> Finding:
    """Make the finding about an error of a start."""
    text, _, allowed = str(error).partition("; allowed: ")
    return Finding(name, Level.PROBLEM, text, f"allowed: {allowed}" if allowed else "")


def _run(check: Check) -> list[Finding]:
    try:
        if check.refuse is not None:
            check.refuse()
        return list(check.find())
    except FlexKVError as error:
        return [problem_of(check.name, error)]
    except Exception as error:  # noqa: BLE001 - a fault of one check must not hide the others
        text = f"could not be checked: {error!r}"
        return [Finding(check.name, Level.ADVICE, text, "please report this error")]


def _refusal(check: Check) -> FlexKVError | None:
    """The error with which a check refuses a start; None if it does not."""
    assert check.refuse is not None
    try:
        check.refuse()
    except UnavailableError:
        return None
    except FlexKVError as error:
        return error
    except Exception as error:  # noqa: BLE001 - what the start needs it finds out by itself
        logger.warning("%s could not be checked before the start: %r", check.name, error)
    return None


def unanswered(name: str, seconds: float) -> Finding:
    """Make the finding about a check that did not end within `seconds` seconds."""
    return Finding(name, Level.PROBLEM, f"no answer within {seconds:g} s", HANGS)
