# SPDX-License-Identifier: Apache-2.0
"""SGLang's own tree gets the pages of its offloads back, whatever happens to them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.decode import SchedulerDisaggregationDecodeMixin
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang_world import PATIENCE_SECONDS  # type: ignore[import-not-found]

from flexkv.engine.boundary import LASTING
from integration.sglang.with_sglang.linked import PAGE, LinkedRank

_PROMPT = 2 * PAGE


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., LinkedRank]]:
    made: list[LinkedRank] = []

    def make(**options: Any) -> LinkedRank:
        made.append(LinkedRank(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def evicted(linked: LinkedRank) -> int:
    """Tokens whose slots SGLang gets when it needs those of all prompts."""
    found: int = linked.tree.evict(EvictParams(num_tokens=2 * _PROMPT)).num_tokens_evicted
    return found


def test_a_decode_server_gets_its_pages_back(make: Callable[..., LinkedRank]) -> None:
    linked = make(mode="decode")
    for number in (100, 200):
        linked.compute(range(number, number + _PROMPT), seed=number)
    assert evicted(linked) == 0
    deadline = time.monotonic() + PATIENCE_SECONDS
    while linked.tree.linker.pending_offloads:
        assert time.monotonic() < deadline
        # The scheduler is a stand-in here: the hook comes before SGLang's own code.
        with pytest.raises(AttributeError, match="scheduler_stage_metrics"):
            SchedulerDisaggregationDecodeMixin.process_decode_queue(
                SimpleNamespace(tree_cache=linked.tree)
            )
    assert evicted(linked) == 2 * _PROMPT


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_each_round_of_a_decode_server_looks_at_its_queues(loop: str) -> None:
    method = getattr(SchedulerDisaggregationDecodeMixin, f"event_loop_{loop}_disagg_decode")
    assert "process_decode_queue" in method.__wrapped__.__code__.co_names


def test_each_offload_names_the_page_before_its_own(
    make: Callable[..., LinkedRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    linked = make()
    origins: list[Any] = []
    monkeypatch.setattr(linked.rank.side, "comes_from", origins.append)
    tokens = array("q", range(3 * _PROMPT))
    for end in (_PROMPT, 2 * _PROMPT, 3 * _PROMPT):
        linked.compute(tokens[:end], seed=end)
    hashes = get_storage_hash_str(RadixKey(tokens), None, page_size=PAGE)
    assert [each.before for each in origins] == [None, hashes[1], hashes[3]]
    linked.settle()


def test_pages_come_back_if_every_poll_fails(
    make: Callable[..., LinkedRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    linked = make()

    def fail(*_: object) -> None:
        raise OSError("nobody expects it")

    side: Any = linked.rank.side
    monkeypatch.setattr(side._cache, "poll", fail)
    for number in (100, 200):
        linked.compute(range(number, number + _PROMPT), seed=number)
    for _ in range(LASTING - 1):
        linked.tree.check_hicache_events()
    assert evicted(linked) == 0
    linked.tree.check_hicache_events()
    assert evicted(linked) == 2 * _PROMPT
    monkeypatch.undo()
