# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive at once with one prefix load it once, into SGLang's own tree and pool."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang_requests import Grammars  # type: ignore[import-not-found]
from sglang_world import same  # type: ignore[import-not-found]

from flexkv_sglang import hooks
from integration.sglang.with_sglang.linked import PAGE, LinkedRank

_PREFIX = 6 * PAGE
_REQUESTS = 24


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[LinkedRank]:
    made = LinkedRank(tmp_path, settings={"always_load": True})
    yield made
    made.close()


class Scheduler:
    """SGLang's queue of requests, and how many tokens its batches have loaded.

    Args:
        linked: SGLang's tree and pool.
        queue: the waiting requests.

    Attributes:
        batches: names of the requests of each batch.
        loaded: the names of requests that loaded, with the tokens of each.
    """

    def __init__(self, linked: LinkedRank, queue: list[Any]) -> None:
        self.waiting_queue = queue
        self.grammar_manager = Grammars()
        self.tree_cache = linked.tree
        self.device = "cuda"
        self.last_batch = object()
        self.batches: list[list[str]] = []
        self.loaded: dict[str, int] = {}
        self._linked = linked

    def step(self) -> None:
        """Choose a batch, load what it needs, and keep its pages."""
        batch, _ = hooks.schedule(Scheduler._take_all, self)
        requests = [] if batch is None else batch.reqs
        self.batches.append([each.rid for each in requests])
        tree, counter = self._linked.tree, self._linked.linker.layer_done_counter
        counter.set_consumer(tree.ready_to_load_host_cache())
        counter.wait_until(0)
        slots = {each.rid: tree.prefix_device_indices(each) for each in requests}
        assert tree.finish_external_linker_loads(requests) == []
        for request in requests:
            tokens = request.origin_input_ids[: request.prefix_len]
            tree.insert(InsertParams(key=RadixKey(array("q", tokens)), value=slots[request.rid]))
        tree.check_hicache_events()

    def _take_all(self) -> tuple[Any, Any]:
        taken, self.waiting_queue = self.waiting_queue, []
        for request in taken:
            request.init_next_round_input(self._linked.tree)
            length = request.host_hit_length
            params = InitLoadBackParams(request.best_match_node, length, req=request)
            found = self._linked.tree.init_load_back(params)
            assert found is not None
            request.host_loaded_length, request.last_node = found
            request.prefix_len += request.host_loaded_length
            request.extend_end = len(request.origin_input_ids)
            if request.host_loaded_length:
                self.loaded[request.rid] = request.host_loaded_length
        batch = SimpleNamespace(reqs=taken) if taken else None
        return batch, SimpleNamespace(is_empty=lambda: False)


def test_a_burst_with_one_prefix_loads_it_once(linked: LinkedRank) -> None:
    tokens = list(range(_PREFIX))
    wanted = linked.compute(tokens, seed=1)
    linked.settle()
    linked.forget()
    queue = [linked.request(f"r {n}", [*tokens, 100 + n]) for n in range(_REQUESTS)]
    scheduler = Scheduler(linked, [*queue])
    while scheduler.waiting_queue:
        scheduler.step()
    rids = [f"r {n}" for n in range(_REQUESTS)]
    assert scheduler.batches == [rids[:1], rids[1:]]
    assert scheduler.loaded == {"r 0": _PREFIX}
    assert [each.prefix_len for each in queue] == [_PREFIX] * _REQUESTS
    assert same(linked.read(linked.tree.prefix_device_indices(queue[-1])[:_PREFIX]), wanted)


def test_prefixes_of_their_own_are_loaded_at_once(linked: LinkedRank) -> None:
    prompts = [list(range(1000 * n, 1000 * n + PAGE)) for n in range(4)]
    for n, tokens in enumerate(prompts):
        linked.compute(tokens, seed=n)
    linked.settle()
    linked.forget()
    queue = [linked.request(f"r {n}", [*tokens, 7]) for n, tokens in enumerate(prompts)]
    scheduler = Scheduler(linked, [*queue])
    scheduler.step()
    assert scheduler.loaded == {f"r {n}": PAGE for n in range(4)}
    assert scheduler.waiting_queue == []


def test_a_prefix_that_nothing_has_is_computed_at_once(linked: LinkedRank) -> None:
    queue = [linked.request(f"r {n}", [*range(_PREFIX), 100 + n]) for n in range(4)]
    scheduler = Scheduler(linked, [*queue])
    scheduler.step()
    assert scheduler.waiting_queue == []
    assert scheduler.loaded == {}
