# SPDX-License-Identifier: Apache-2.0
"""The wait of an operator's call for the drives that it has removed blocks from."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait

CLEAR_SECONDS = 120.0
"""Time limit for the answer to a removal: a busy drive may take a minute. Not tuned."""

_SYNC_SECONDS = 100.0
"""The longest wait for drives, so that the answer names those that hang within `CLEAR_SECONDS`."""


def await_removals(asked: Sequence[Future[str]]) -> str:
    """Wait until the drives keep removals over a power failure.

    Args:
        asked: what the cache's `sync` has returned.

    Returns:
        Why a later process may find removed blocks; empty if there is no reason.
    """
    done, hanging = wait(asked, _SYNC_SECONDS)
    reasons = [each.result() for each in asked if each in done]
    if hanging:
        reasons.append(
            f"{len(hanging)} cache directories have not confirmed it for {_SYNC_SECONDS:g} s; run "
            "the command again"
        )
    return "; ".join(filter(None, reasons))
