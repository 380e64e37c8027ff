# SPDX-License-Identifier: Apache-2.0
"""Engines of one node share one cache, `flexkv serve`: the tokens are those of an engine without
FlexKV, also while the service hangs and after its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.tests import disks
from integration.tests.corpus import ABORTED, CONCURRENT, EVICTED, WARM
from integration.tests.disks import restorable, restored
from integration.tests.nodes import Nodes
from integration.tests.reference import Reference
from integration.tests.steps import ask_each, ask_together

FIRST = ABORTED[:1] + WARM
LATE = EVICTED[:4]
SLOTS = 600


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """The directory and the process of a service with memory for all that the tests store."""
    root = tmp_path / "service"
    environ = os.environ | {
        "FLEXKV_CPU_CACHE_GB": str(disks.gigabytes(SLOTS)),
        "FLEXKV_RUNTIME_DIR": str(tmp_path / "runtime"),
    }
    command = [sys.executable, "-m", "flexkv", "serve", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            assert "listens" in process.stdout.readline()
            yield root, process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def test_what_one_engine_has_computed_another_loads(
    nodes: Nodes, service: tuple[Path, subprocess.Popen[str]], reference: Reference
) -> None:
    root, process = service
    one, other = nodes.start(service=str(root)), nodes.start(service=str(root))
    reference.check_all(FIRST, ask_each(one, FIRST), what="the first engine")
    found = ask_each(other, FIRST)
    reference.check_all(FIRST, found, what="the other engine")
    assert restored(found) == restorable(FIRST)

    # Both compute and load at once.
    reference.check_all(CONCURRENT, ask_together(other, CONCURRENT), what="together")
    one.forget()
    reference.check_all(CONCURRENT, ask_together(one, CONCURRENT), what="together again")

    # It hangs, then it is gone: what is in host memory is loaded as before.
    process.send_signal(signal.SIGSTOP)
    for what in ("it hangs", "it is gone"):
        one.forget()
        found = ask_each(one, FIRST)
        reference.check_all(FIRST, found, what=what)
        assert restored(found) == restorable(FIRST), what
        reference.check_all(LATE, ask_each(other, LATE), what=what)
        process.kill()
        process.wait()
