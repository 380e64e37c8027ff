# SPDX-License-Identifier: Apache-2.0
"""Two engines with the same model on one cache directory. The second is vLLM's engine core, which
starts and ends; what engines without a disk, and with one, answer is the matter of other tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.tests.corpus import WARM
from integration.tests.disks import restorable, restored
from integration.tests.reference import Reference
from integration.tests.started_core import STARTED
from integration.tests.steps import ask_each, core_log


def test_a_second_engine_does_without_the_directory(
    disk_engine: Engine, disk_dir: Path, reference: Reference, work_dir: Path
) -> None:
    """Its error names the directory and the process that has it; the first one goes on."""
    first = disk_engine
    log = core_log(first.config, work_dir / "logs" / "second-core.log")
    assert STARTED in log
    (said,) = [line for line in log.splitlines() if "is in use by process" in line]
    assert str(disk_dir) in said
    assert any(f"process {pid};" in said for pid in first.pids()), said
    assert "ssd_in_use=own" in said.partition("allowed:")[2]

    reference.check_all(WARM, ask_each(first, WARM), what="the first engine")
    first.forget()
    warm = ask_each(first, WARM)
    reference.check_all(WARM, warm, what="the first engine, warm")
    assert restored(warm) == restorable(WARM)


def test_a_second_engine_with_a_cache_of_its_own(
    disk_engine: Engine,
    disk_dir: Path,
    disk_config: Callable[..., EngineConfig],
    reference: Reference,
    work_dir: Path,
) -> None:
    reference.check_all(WARM, ask_each(disk_engine, WARM), what="the first engine")
    before = len(list(disk_dir.glob("*/lock")))
    log = core_log(disk_config(disk_dir, in_use="own"), work_dir / "logs" / "own-core.log")
    assert STARTED in log
    assert "is in use by process" not in log
    assert len(list(disk_dir.glob("*/lock"))) == before + 1
    disk_engine.forget()
    warm = ask_each(disk_engine, WARM)
    reference.check_all(WARM, warm, what="the first engine, warm")
    assert restored(warm) == restorable(WARM)
