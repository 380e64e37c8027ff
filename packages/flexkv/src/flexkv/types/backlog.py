# SPDX-License-Identifier: Apache-2.0
"""How much of a backlog one poll takes.

An engine's step waits for the poll, so a poll takes few blocks. It takes more of a long backlog,
which would otherwise grow without a bound.
"""

from __future__ import annotations

BACKLOG_SHARE = 64
"""A poll takes a 64th of a backlog. To begin the writes of a 64th of 1,312 blocks, a prompt, takes
0.2 ms; a disk then has them after about 80 polls."""


def share_of(backlog: int, least: int) -> int:
    """The most blocks that one poll takes. A poll has time for `least`, however short the backlog
    is."""
    return max(least, backlog // BACKLOG_SHARE)
