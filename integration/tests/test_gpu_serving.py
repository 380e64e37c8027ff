# SPDX-License-Identifier: Apache-2.0
"""What `nox -s gpu` measures on a model that serves, with a model and sizes for CPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.gpu import goals
from integration.gpu.results import Log
from integration.gpu.serving import rows
from integration.gpu.serving_batches import FLEXKV, NATIVE, NONE, Workload, measure
from integration.harness import connector
from integration.harness.checkpoint import TINY
from integration.harness.connector import Connector
from integration.harness.host import EngineHost
from integration.tests.corpus import ENGINE_BLOCK

LOAD = Workload(
    TINY,
    prompt_tokens=1300,
    new_tokens=100,  # so many that they come one by one on a busy machine, too
    batch=2,
    repeats=2,
    engine_args={"block_size": ENGINE_BLOCK},
    forked=True,
)


@pytest.fixture(autouse=True)
def no_other_engine(host: EngineHost) -> None:
    host.close()


def test_a_batch_is_asked_new_and_seen(
    tmp_path: Path,
    flexkv: Callable[..., dict[str, Any]],
    offloading: Callable[..., Connector],
) -> None:
    log = Log()
    measured = measure(
        LOAD,
        {
            NONE: connector.NONE,
            FLEXKV: connector.plugin(**flexkv()),
            # vLLM's own cache refuses to run on CPUs: here FlexKV's takes its place.
            NATIVE: offloading(),
        },
        tmp_path,
        log,
    )
    found = list(rows(LOAD, measured))
    assert all(row.value > 0 for row in found)
    shown = Counter(row.goal for row in found if row.goal is not None and row.goal.name)
    assert shown == {
        goals.WARM_TTFT: 1,
        goals.WARM_RATE: 1,
        goals.PEER_TTFT: 1,
        goals.PEER_RATE: 1,
    }
    figures = [row for row in found if "samples" in row.samples]
    assert [len(row.samples["samples"]) for row in figures] == [LOAD.repeats] * 15
    # What was measured is there before the next engine starts.
    assert found[0].what.startswith(f"TTFT of {NONE}, prompts new")
    assert log.notes == []
