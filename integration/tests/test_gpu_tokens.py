# SPDX-License-Identifier: Apache-2.0
"""What `nox -s gpu` compares of a model's answers, with a model and sizes for CPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.gpu import goals
from integration.gpu.results import Log
from integration.gpu.tokens import ASYNC, LAYERWISE, Questions, compare
from integration.harness.checkpoint import TINY
from integration.harness.host import EngineHost
from integration.tests.corpus import ENGINE_BLOCK, FLEXKV_BLOCK


@pytest.fixture(autouse=True)
def no_other_engine(host: EngineHost) -> None:
    host.close()


def test_loaded_blocks_give_the_same_answers_and_a_wrong_byte_does_not(
    tmp_path: Path, flexkv: Callable[..., dict[str, Any]]
) -> None:
    """With the compiled model, vLLM's default; and without asynchronous scheduling, which is no
    default, for layer-wise loads."""
    settings = {name: value for name, value in flexkv().items() if name != "block_tokens"}
    modes = (ASYNC, LAYERWISE)
    engine = {
        "block_size": ENGINE_BLOCK,
        "forked": True,
        "kv_cache_bytes": 64 << 20,
        "async_scheduling": False,
        "extra_args": {"enforce_eager": False},
    }
    asked = Questions("tiny", TINY, FLEXKV_BLOCK, (1, 2, 7), modes, settings, engine, at_once=True)
    rows = list(compare(asked, tmp_path, Log()))
    assert [row.value for row in rows if row.goal == goals.SAME_TOKENS] == [0] * (len(modes) + 1)
    # float32 rounds too little to change a token.
    assert [row.value for row in rows if row.goal is None] == [0] * len(modes)
    (unseen,) = [row for row in rows if row.what.startswith("wrong bytes")]
    assert (unseen.value, unseen.passed) == (0, True)
    assert unseen.detail == "of 4, one after the other"
    assert len({row.what for row in rows}) == len(rows)
