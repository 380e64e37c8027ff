# SPDX-License-Identifier: Apache-2.0
"""Waiting for what other threads do, so that no test depends on how fast this machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 120.0
"""What has not happened by then never will, however busy the machine is."""


def _unknown() -> str:
    return "what is waited for does not happen"


def wait_until(
    condition: Callable[[], object],
    act: Callable[[], object],
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
