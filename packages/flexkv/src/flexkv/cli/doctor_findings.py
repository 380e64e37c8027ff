# SPDX-License-Identifier: Apache-2.0
"""Runs the checks of `flexkv doctor` side by side. A check that does not end is a finding too."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flexkv.types.deadline import HANGS, call_within


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
    """One result of a check.

    Attributes:
        check: name of the check, the first word of the output.
        level: importance of the finding.
        text: the state that the check found.
        change: the change that the user should make; empty if none is needed.
    """

    check: str
    level: Level
    text: str
    change: str = ""


Check = Callable[[], Iterable[Finding]]


def run_checks(checks: Mapping[str, Check], seconds: float) -> list[Finding]:
    """Run all checks side by side, each in a thread of its own.

    Args:
        checks: the checks, by name. An exception of a check becomes a finding.
        seconds: time limit for all checks together. A check that takes longer is left behind in its
            thread, which does not keep the process.

    Returns:
        The findings, in the order of `checks`.
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
    """Make the finding about a check that did not end within `seconds` seconds."""
    return Finding(
        name,
        Level.PROBLEM,
        f"no answer within {seconds:g} s",
        HANGS,
    )
