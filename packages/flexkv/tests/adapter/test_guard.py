# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from flexkv.adapter.guard import Edge


def test_errors_end_here_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    edge = Edge()
    for _ in range(3):
        with edge.guard("lookup", "it is a miss"):
            raise ValueError("broken by the test")
    assert edge.failures == {"lookup": 3}
    assert len([r for r in caplog.records if "error in lookup" in r.message]) == 1


def test_interrupts_pass() -> None:
    edge = Edge()
    with pytest.raises(KeyboardInterrupt), edge.guard("lookup", "it is a miss"):
        raise KeyboardInterrupt
    assert not edge.failures
