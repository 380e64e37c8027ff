# SPDX-License-Identifier: Apache-2.0
"""What `nox -s gpu` compares of a model's answers, with a model and sizes for CPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.gpu import goals
from integration.gpu.results import Log
from integration.gpu.tokens import MODES, Questions, compare
from integration.harness.checkpoint import TINY
from integration.harness.host import EngineHost
from integration.tests.corpus import ENGINE_BLOCK, FLEXKV_BLOCK


@pytest.fixture(autouse=True)
def no_other_engine(host: EngineHost) -> None:
    host.close()


def test_loaded_blocks_give_the_same_answers_and_a_wrong_byte_does_not(
    tmp_path: Path, flexkv: Callable[..., dict[str, Any]]
) -> None:
    settings = {name: value for name, value in flexkv().items() if name != "block_tokens"}
    engine = {"block_size": ENGINE_BLOCK, "forked": True, "kv_cache_bytes": 64 << 20}
    asked = Questions(TINY, FLEXKV_BLOCK, (1, 2, 7), settings, engine)
    rows = list(compare(asked, tmp_path, Log()))
    assert [row.value for row in rows if row.goal == goals.SAME_TOKENS] == [0] * len(MODES)
    # float32 rounds too little to change a token.
    assert [row.value for row in rows if row.goal is None] == [0] * len(MODES)
    (unseen,) = [row for row in rows if row.what.startswith("wrong bytes")]
    assert (unseen.value, unseen.passed) == (0, True)
    assert unseen.detail == "of 4, one after the other"
