# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_world import PATIENCE_SECONDS, Rank

from flexkv import CacheConfig
from flexkv.service.server import NodeServer


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


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts services, and returns their directories."""
    running: list[tuple[NodeServer, threading.Thread]] = []

    def begin(**settings: Any) -> str:
        root = str(tmp_path / f"service {len(running)}")
        folder = str(tmp_path / "run")
        config = {"runtime_dir": folder, "cpu_cache_gb": 1 / 256} | settings
        server = NodeServer(root, CacheConfig(**config))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        return root

    yield begin
    for server, thread in running:
        server.stop()
        thread.join()
        server.close(0)
