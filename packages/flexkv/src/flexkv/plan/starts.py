# SPDX-License-Identifier: Apache-2.0
"""Starts of sessions in traces that name times within a session only."""

from __future__ import annotations

from flexkv.plan.fields import LineError

_HOUR_SECONDS = 3600.0


class Starts:
    """Makes starts at equal distances.

    Args:
        sessions_per_hour: the number of sessions that start in an hour; None if the user named
            none.

    Attributes:
        count: the number of starts made so far.
    """

    def __init__(self, sessions_per_hour: float | None) -> None:
        self._rate = sessions_per_hour
        self.count = 0

    def next(self) -> float:
        """The start of the next session, in seconds.

        Raises:
            LineError: the user named no rate.
        """
        if self._rate is None:
            raise LineError(
                "the start of the session", "missing", "a trace with it, or --sessions-per-hour"
            )
        start = self.count * _HOUR_SECONDS / self._rate
        self.count += 1
        return start
