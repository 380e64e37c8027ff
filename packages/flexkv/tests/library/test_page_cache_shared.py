# SPDX-License-Identifier: Apache-2.0
"""`open_cache` over a bucket, which has to be asked which blocks it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'flexkv[objects]'")
pytest.importorskip("moto", reason="moto is not installed: pip install moto flask flask-cors")

import numpy as np

from flexkv import KVLayout, PageCache, TensorView, open_cache
from integration.harness.s3_server import BUCKET, S3Server
from packages.conftest import PATIENCE_SECONDS
from packages.flexkv.tests.service.served import Service

PAGES = 16
KEYS = [b"block %d" % i for i in range(10)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    made = S3Server()
    for name, value in made.environ.items():
        monkeypatch.setenv(name, value)
    yield made
    made.kill()


@pytest.fixture(params=["own", "served"])
def make(
    server: S3Server, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[..., PageCache]]:
    services: list[Service] = []
    tensor = np.ones((PAGES, 16, 64), np.uint8)
    layout = KVLayout.from_tensors([TensorView.of("layer", tensor, page_dim=0)], PAGES)

    def make(question_seconds: float = PATIENCE_SECONDS) -> PageCache:
        settings: dict[str, Any] = {
            "cpu_cache_gb": 1 / 1024,
            "objects_url": f"s3://{BUCKET}/pages",
            "objects_question_seconds": question_seconds,
            "objects_timeout_seconds": PATIENCE_SECONDS,
        }
        if request.param == "served":
            for each in services:
                each.close(PATIENCE_SECONDS)
            folder = tmp_path / str(len(services))  # with nothing in its memory
            folder.mkdir()
            services.append(Service(folder, **settings))
            settings = {"service": services[-1].root}
        return open_cache(settings, layout, identity="model")

    yield make
    for each in services:
        each.close()


def test_a_lookup_counts_what_the_bucket_has(make: Callable[..., PageCache]) -> None:
    with make() as cache:
        assert cache.lookup(KEYS) == 0
        assert cache.store(KEYS[:4], range(4)) == 4
        assert cache.lookup(KEYS) == 4
        assert cache.flush(PATIENCE_SECONDS)
    with make() as cache:
        assert cache.lookup(KEYS) == 4
        assert cache.load(KEYS[:2], range(2)) == 2
        assert cache.lookup(KEYS) == 4
        assert cache.lookup([*KEYS[4:], KEYS[0]]) == 0


def test_a_bucket_that_does_not_answer_counts_as_empty(make: Callable[..., PageCache]) -> None:
    with make(question_seconds=0.001) as cache:
        # In time or not, no answer says that there is a block.
        assert cache.lookup(KEYS) == 0
