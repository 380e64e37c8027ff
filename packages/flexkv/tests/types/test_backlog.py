# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from flexkv.types.backlog import BACKLOG_SHARE, share_of


def test_a_poll_takes_the_least_number_or_a_share() -> None:
    assert share_of(0, 16) == share_of(16 * BACKLOG_SHARE, 16) == 16
    assert share_of(17 * BACKLOG_SHARE, 16) == 17
