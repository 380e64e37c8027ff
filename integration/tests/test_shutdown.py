# SPDX-License-Identifier: Apache-2.0
"""A server that is told to stop writes what waits for the disk, if vLLM gives it the time."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from integration.harness import connector
from integration.harness.config import EngineConfig
from integration.harness.host import EngineHost
from integration.harness.server import Server
from integration.tests import disks
from integration.tests.conftest import ARENA_GB
from integration.tests.corpus import EVICTED
from integration.tests.disks import restorable, restored
from integration.tests.reference import Reference
from integration.tests.steps import ask_each

WRITE_MBPS = 1.5
"""All blocks, which wait when the last prompt is answered, take 6 s. By itself FlexKV takes 2.5 s
at its end."""
TIMEOUT_SECONDS = 240


def blocks_on_disk(server: Server) -> float:
    (found,) = re.findall(r'^vllm:flexkv_blocks{.*tier="disk".*} (\S+)$', server.metrics(), re.M)
    return float(found)


def test_blocks_that_wait_are_on_disk_after_sigterm(
    host: EngineHost,
    reference: Reference,
    flexkv: Callable[..., dict[str, Any]],
    engine_config: Callable[..., EngineConfig],
    work_dir: Path,
) -> None:
    settings = disks.settings(work_dir / "sigterm-disk") | {"cpu_cache_gb": ARENA_GB}
    held = work_dir / "sigterm-held"
    slow = connector.slow_disk(write_mbps=WRITE_MBPS, held=held, **flexkv(**settings))
    allowed = {"shutdown_timeout": TIMEOUT_SECONDS}
    config = engine_config(slow, probe=False, extra_args=allowed)
    host.close()  # one engine at a time
    with Server(config, work_dir / "logs" / "sigterm.log", None) as server:
        held.touch()  # its start writes, too
        for prompt in EVICTED:
            server.generate(prompt)
        assert blocks_on_disk(server) == 0
        held.unlink()
    # SIGTERM was sent, and the server has ended by itself.
    assert "FlexKV ends: " in server.log()
    assert "force killing" not in server.log()

    # As the server, without the probe and vLLM's plugins, which count in the fingerprint.
    engine = host.start(engine_config(connector.module_path(**flexkv(**settings)), probe=False))
    answers = ask_each(engine, EVICTED)
    reference.check_all(EVICTED, answers, what="after SIGTERM")
    assert restored(answers) == restorable(EVICTED)
