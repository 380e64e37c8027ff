# SPDX-License-Identifier: Apache-2.0
"""Calls beside one that hangs, on a machine that may be busy: all others are waited for."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future, wait
from typing import Any

import pytest

from packages.conftest import PATIENCE_SECONDS


def wait_for_all_but_one(monkeypatch: pytest.MonkeyPatch, *, alone: bool = True) -> None:
    """Let the limit of `flexkv.types.deadline.call_within` pass once all calls but one have ended.

    So only the call that hangs is late, however slow the machine is, and no test waits for the
    limit. Without `alone`, a call beside which there is no other keeps its own limit.
    """

    def wait_for_others(futures: Collection[Future[Any]], seconds: float) -> Any:
        assert seconds > 0
        if len(futures) == 1 and not alone:
            return wait(futures, seconds)
        end = time.monotonic() + PATIENCE_SECONDS
        while sum(not each.done() for each in futures) > 1:
            assert time.monotonic() < end, "a call beside the one that hangs does not end"
            time.sleep(0.001)
        # An end that comes at once is still no hang.
        return wait(futures, min(seconds, 0.1))

    monkeypatch.setattr("flexkv.types.deadline.wait", wait_for_others)
