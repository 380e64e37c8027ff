# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sglang_world import Rank


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
