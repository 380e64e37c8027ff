# SPDX-License-Identifier: Apache-2.0
"""Blocks that host memory does not expect back pass through it on their way to a disk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tiered_engine import Engine, keys

from flexkv.eviction import RequestContext

OLD = "abcdefgh"
"""Two prompts that fill host memory."""
NUMBERS = count()


Make = Callable[..., Engine]


@pytest.fixture
def make(tmp_path: Path, at_end: ExitStack) -> Make:
    """Makes an engine whose host memory is full of blocks of which nothing is known."""

    def start(**options: Any) -> Engine:
        engine = at_end.enter_context(closing(Engine(tmp_path, policy="hazard", **options)))
        for prompt in (OLD[:4], OLD[4:]):
            assert request(engine, prompt, None) == 4
        return engine

    return start


def request(engine: Engine, prompt: str, returns: bool | None) -> int:
    """A request computes a prompt, of which its client says whether it comes back. Returns how many
    blocks host memory takes."""
    prefix = keys(*prompt)
    number = str(next(NUMBERS))
    engine.cache.record((), RequestContext(request_id=number, returns=returns), prefix)
    transfer = engine.cache.store(prefix, engine.cache.missing(prefix))
    if transfer is not None:
        assert transfer.keys == prefix[: len(transfer.keys)]
        engine.finish(transfer)
    engine.settle()
    engine.cache.ended(number, 100)
    return 0 if transfer is None else len(transfer.keys)


def there(engine: Engine, names: str) -> str:
    """Which of these blocks host memory has."""
    return "".join(name for name in names if engine.cache.lookup(keys(name)))


def test_what_is_not_expected_back_reaches_the_disk(make: Make) -> None:
    engine = make()
    assert request(engine, "wxyz", returns=False) == 4
    assert all(engine.disk.contains(keys(*"wxyz")))
    assert engine.cache.counters.refused_blocks == 0


def test_what_only_passes_through_makes_room_first(make: Make) -> None:
    engine = make()
    request(engine, "wxyz", returns=False)
    kept = there(engine, OLD)
    assert len(kept) == 4
    for prompt in ("pqrs", "ijkl", "mnop"):
        assert request(engine, prompt, returns=False) == 4
        assert there(engine, OLD) == kept
    assert all(engine.disk.contains(keys(*"pqrsijklmnop")))


def test_what_is_not_expected_back_is_fetched_all_the_same(make: Make) -> None:
    engine = make()
    request(engine, "wxyz", returns=False)
    request(engine, "pqrs", returns=False)
    assert there(engine, "wxyz") == ""
    engine.cache.record((), RequestContext(request_id="again", returns=False), keys(*"wxyz"))
    assert engine.fetched(*"wxyz") == 4
