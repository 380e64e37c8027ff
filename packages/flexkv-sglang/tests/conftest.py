# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_world import PATIENCE_SECONDS, Rank


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    """FlexKV's settings of a disk."""
    return {
        "ssd_cache_gb": 1 / 64,
        "ssd_cache_dir": (str(tmp_path / "disk"),),
        "ssd_timeout_seconds": PATIENCE_SECONDS,
    }


@pytest.fixture
def make_rank(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    """Makes ranks, and closes them."""
    made: list[Rank] = []

    def make(kind: str = "mha", **options: object) -> Rank:
        made.append(Rank(tmp_path, kind, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for rank in made:
        rank.close()
