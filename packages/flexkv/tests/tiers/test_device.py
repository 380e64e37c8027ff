# SPDX-License-Identifier: Apache-2.0
"""What the log says of a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flexkv.tiers import device as module
from flexkv.tiers.circuit import PAUSE_SECONDS
from flexkv.tiers.device import BlockDevice
from flexkv.tiers.link import Link
from packages.patience import PATIENCE_SECONDS


@pytest.fixture
def device() -> Iterator[BlockDevice]:
    link = Link("test", 1, 1, 1 << 20, PATIENCE_SECONDS)
    yield BlockDevice("objects", link, 1, pause_seconds=PAUSE_SECONDS, check="the network")
    assert link.close(PATIENCE_SECONDS)


def note(device: BlockDevice, what: str, error: str) -> None:
    """A call that has not failed as a whole."""
    device.note(device.reads, what, False, error, 0.0)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records]


def test_the_first_error_of_each_kind_is_logged_once(
    device: BlockDevice, caplog: pytest.LogCaptureFixture
) -> None:
    note(device, "writes to", "")
    for i in range(3):
        note(device, "writes to", f"403 Forbidden, no access to {i:032x} after {i}.5 s")
        note(device, "reads from", "403 Forbidden")
        note(device, "writes to", "code -704")
        note(device, "writes to", "code -900")
    said = ["no access to", "reads from objects failed: 403 Forbidden;", "-704", "-900"]
    assert [text in line for text, line in zip(said, lines(caplog), strict=True)] == [True] * 4


def test_a_store_that_makes_up_texts_does_not_fill_the_log(
    device: BlockDevice, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(100):
        note(device, "reads from", "x" * i)
    assert len(lines(caplog)) == module._KINDS
