# SPDX-License-Identifier: Apache-2.0
"""Two engines with the same model on one cache directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.tests.corpus import WARM
from integration.tests.disks import restorable, restored
from integration.tests.reference import Reference
from integration.tests.steps import ask_each


def test_a_second_engine_does_without_the_directory(
    disk_engine: Engine, disk_dir: Path, reference: Reference, work_dir: Path
) -> None:
    """Its error names the directory and the process that has it; the first one goes on."""
    first = disk_engine
    with Engine(first.config, work_dir / "logs" / "second.log") as second:
        reference.check_all(WARM, ask_each(second, WARM), what="the second engine")
        (said,) = [line for line in second.log().splitlines() if "is in use by process" in line]
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
    config = disk_config(disk_dir, in_use="own")
    with Engine(config, work_dir / "logs" / "second.log") as second:
        answers = ask_each(second, WARM)
        reference.check_all(WARM, answers, what="the second engine")
        assert restored(answers) == [0] * len(WARM), "it has blocks of the first one"
        second.forget()
        warm = ask_each(second, WARM)
        reference.check_all(WARM, warm, what="the second engine, warm")
        assert restored(warm) == restorable(WARM)
        assert len(list(disk_dir.glob("*/lock"))) == 2
    reference.check_all(WARM, ask_each(disk_engine, WARM), what="the first engine")
