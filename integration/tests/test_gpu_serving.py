# SPDX-License-Identifier: Apache-2.0
"""What `nox -s gpu` measures on a model that serves, with a model and sizes for CPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.gpu.results import Log
from integration.gpu.serving import FLEXKV, NATIVE, NEW, NONE, SEEN, Workload, measure, rows
from integration.harness import connector
from integration.harness.checkpoint import TINY
from integration.harness.connector import Connector
from integration.harness.host import EngineHost
from integration.tests.corpus import ENGINE_BLOCK

LOAD = Workload(
    TINY,
    prompt_tokens=1300,
    new_tokens=20,
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
    batches = measure(
        LOAD,
        {
            NONE: connector.NONE,
            # vLLM's own cache refuses to run on CPUs: here FlexKV's takes its place.
            NATIVE: offloading(),
            FLEXKV: connector.plugin(**flexkv()),
        },
        tmp_path,
        Log(),
    )
    measured = {(NONE, NEW), (NATIVE, NEW), (NATIVE, SEEN), (FLEXKV, NEW), (FLEXKV, SEEN)}
    assert batches.keys() == measured
    assert all(len(found) == LOAD.repeats for found in batches.values())
    found = rows(LOAD, batches)
    assert len(found) == 8
    assert all(row.value > 0 for row in found)


def test_what_is_not_cached_is_not_measured(
    tmp_path: Path, flexkv: Callable[..., dict[str, Any]]
) -> None:
    without = connector.plugin(**flexkv(enable=False))
    with pytest.raises(RuntimeError, match="0 of 1300 tokens were cached, where 90% were to be"):
        measure(LOAD, {FLEXKV: without}, tmp_path, Log())
