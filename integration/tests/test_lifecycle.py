# SPDX-License-Identifier: Apache-2.0
"""What an engine leaves behind when it stops, and when it is killed. `test_client_killed` of the
harness kills its client."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.harness import connector, processes
from integration.harness.config import EngineConfig
from integration.harness.host import EngineHost
from integration.tests.corpus import ABORTED, WARM
from integration.tests.reference import Reference
from integration.tests.steps import ask_each, whole_blocks

Config = Callable[..., EngineConfig]


@pytest.fixture
def named_config(flexkv: Callable[..., dict[str, Any]], engine_config: Config) -> Config:
    """Engines with one id: every start of them wants the same arena."""
    chosen = connector.plugin(engine_id="lifecycle", **flexkv())
    return lambda **changes: engine_config(chosen, **changes)


def _files(folder: Path) -> list[str]:
    """Files under a folder but FlexKV's lock, which has no content and stays."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name != "lock")


def _kinds(folder: Path) -> list[str]:
    """What kinds of files those are."""
    return sorted(Path(name).suffix for name in _files(folder))


def test_after_a_kill_the_next_start_works_and_leaves_nothing(
    host: EngineHost, reference: Reference, named_config: Config, runtime_dir: Path
) -> None:
    engine = host.start(named_config())
    ask_each(engine, WARM)
    # Killed in the middle of stores: a long prompt is being computed.
    engine.submit(ABORTED[0]).wait_first_token()
    engine.submit(ABORTED[1])
    killed = engine.kill()
    assert len(killed) >= 2
    # The arena has no name, so nothing of it can be left; vLLM's own message queues are.
    assert engine.pids() == []
    assert not [path for path in engine.leftovers if "flexkv" in path.name.lower()]
    kinds = [".health", ".sock", ".sock"]
    assert _kinds(runtime_dir) == kinds, "which belong to nobody now"

    # Its processes are begun as vLLM's platform of CPUs does it.
    engine = host.start(named_config(forked=False))
    for entry in runtime_dir.iterdir():
        assert stat.S_IMODE(entry.stat().st_mode) == 0o600, entry
    assert stat.S_IMODE(runtime_dir.stat().st_mode) == 0o700
    assert _kinds(runtime_dir) == kinds, "those of the running engine"
    assert len(engine.pids()) >= 3
    assert processes.shm_files(engine.pids()), "vLLM itself has files there"
    cold = ask_each(engine, WARM)
    reference.check_all(WARM, cold, what="after the kill")
    assert [answer.cached_tokens for answer in cold] == [0] * len(WARM)
    engine.forget()
    warm = ask_each(engine, WARM)
    reference.check_all(WARM, warm, what="warm after the kill")
    assert [answer.cached_tokens for answer in warm] == [whole_blocks(len(p)) for p in WARM]

    assert engine.close() == [], "processes that had to be killed"
    assert engine.pids() == []
    assert engine.leftovers == set()
    assert _files(runtime_dir) == []
