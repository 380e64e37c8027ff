# SPDX-License-Identifier: Apache-2.0
"""Pauses between the tries of work that has to be done at last, such as the record of a reset."""

from __future__ import annotations

_MOST_DOUBLINGS = 64
"""No pause is doubled more often. Without a bound, the thread of the work would end by an
OverflowError: 1,025 failures, 5 s apart, are an outage of 85 minutes."""


def pause_after(failures: int, shortest: float, longest: float) -> float:
    """Seconds to wait before the next try. Each failure doubles them.

    Args:
        failures: how many tries in a row have failed, 1 or more.
        shortest: seconds after the first failure.
        longest: the most seconds.
    """
    return min(shortest * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), longest)
