# SPDX-License-Identifier: Apache-2.0
"""Waiting for what other threads and processes do, however slow this machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 180.0
"""What is slow is not lost, unless a test says so. At load 15 on two cores, four commands that each
take 15 s ended after 59 s."""


def _rest() -> None:
    time.sleep(0.0005)


def _unknown() -> str:
    return "what is waited for does not happen"


def wait_until(
    condition: Callable[[], object],
    act: Callable[[], object] = _rest,
    describe: Callable[[], str] = _unknown,
) -> None:
    """Do `act` again and again until `condition` holds.

    Raises:
        AssertionError: it never does; with the text of `describe`.
    """
    end = time.perf_counter() + PATIENCE_SECONDS
    while not condition():
        assert time.perf_counter() < end, describe()
        act()
        time.sleep(0)  # lets others run


def patient_objects(url: str) -> dict[str, Any]:
    """Settings for blocks at a URL, whose answers FlexKV awaits."""
    return {
        "objects_url": url,
        "objects_question_seconds": PATIENCE_SECONDS,
        "objects_timeout_seconds": PATIENCE_SECONDS,
    }
