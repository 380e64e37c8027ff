# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hung_calls import wait_for_all_but_one

from flexkv.preflight.findings import Check, Finding, Level, refuse_start, run_checks
from flexkv.types.errors import ConfigError, UnavailableError


def test_what_hangs_is_a_finding_and_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_all_but_one(monkeypatch)
    stop = threading.Event()

    def hangs() -> Iterator[Finding]:
        stop.wait()
        yield Finding("drive", Level.OK, "late")

    def breaks() -> Iterator[Finding]:
        yield Finding("first", Level.OK, "there")
        raise RuntimeError("oops")

    fine = [Finding("kernel", Level.OK, "new")]
    found = run_checks(
        [Check("drive", hangs), Check("code", breaks), Check("kernel", lambda: fine)], 0.5
    )
    stop.set()
    assert [(each.check, each.level) for each in found] == [
        ("drive", Level.PROBLEM),
        ("code", Level.ADVICE),
        ("kernel", Level.OK),
    ]
    assert found[0].text == "no answer within 0.5 s"
    assert "oops" in found[1].text


def test_an_error_of_a_start_is_a_problem_and_its_check_says_no_more() -> None:
    def refuse() -> None:
        raise ConfigError("x is 1; allowed: 2")

    fine = [Finding("x", Level.OK, "all is well")]
    (found,) = run_checks([Check("x", lambda: fine, refuse)], 10.0)
    assert found == Finding("x", Level.PROBLEM, "x is 1", "allowed: 2")


def test_a_start_ends_with_the_first_error_and_with_no_finding() -> None:
    def refusing(text: str) -> Check:
        def refuse() -> None:
            raise ConfigError(text)

        return Check(text, refuse=refuse)

    problem = Check("worst", lambda: [Finding("worst", Level.PROBLEM, "bad")])
    refuse_start([problem, Check("none", refuse=lambda: None)], 10.0)
    with pytest.raises(ConfigError, match="first"):
        refuse_start([problem, refusing("first"), refusing("next")], 10.0)


def test_what_passes_hangs_or_is_broken_does_not_end_a_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wait_for_all_but_one(monkeypatch)
    stop = threading.Event()

    def late() -> None:
        raise UnavailableError("in use")

    def broken() -> None:
        raise RuntimeError("oops")

    checks = [Check("late", refuse=late), Check("broken", refuse=broken)]
    refuse_start([*checks, Check("hangs", refuse=stop.wait)], 0.5)
    stop.set()
    (line,) = caplog.messages
    assert line == "broken could not be checked before the start: RuntimeError('oops')"
