# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from flexkv.tiers import failures
from flexkv.tiers.failures import FailureLog


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records]


def test_the_first_error_of_each_kind_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog("objects")
    log.note("writes to", "")
    for i in range(3):
        log.note("writes to", f"403 Forbidden, no access to {i:032x} after {i}.5 s")
        log.note("reads from", "403 Forbidden")
        log.note("writes to", "code -704")
        log.note("writes to", "code -900")
    said = ["no access to", "reads from objects failed: 403 Forbidden;", "-704", "-900"]
    assert [text in line for text, line in zip(said, lines(caplog), strict=True)] == [True] * 4


def test_a_store_that_makes_up_texts_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = FailureLog("objects")
    for i in range(100):
        log.note("reads from", "x" * i)
    assert len(lines(caplog)) == failures._KINDS
