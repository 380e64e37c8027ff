# SPDX-License-Identifier: Apache-2.0
"""Which work of FlexKV is told to SGLang's traces, and for which requests."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kept_spans import KeptSpans
from sglang_requests import OwnPages
from sglang_world import Rank, hashes_of, wait_for

from flexkv_sglang.request import in_sglangs_spans
from packages.inside_adapters import trace_rank, traced_transfers

MakeRank = Callable[..., Rank]


def follow(rank: Rank, rid: str) -> KeptSpans:
    told = KeptSpans()
    trace_rank(rank.side, told)
    rank.requests.matched(rank.request(rid), 0)
    return told


def test_a_fetch_and_a_load_have_a_span(make_rank: MakeRank, disk: dict[str, Any]) -> None:
    first = make_rank(settings=disk)
    hashes = hashes_of("a", 3)
    first.fill([1, 2, 3], seed=1)
    assert first.store(hashes, [1, 2, 3])
    first.close()
    rank = make_rank(settings=disk)
    told = follow(rank, "r")
    rank.look_ahead("r", hashes)
    wait_for(rank, "r")
    assert rank.lookup("r", hashes) == [3]
    assert told.spans == []
    assert rank.load("r", hashes, [7, 8, 9])
    fetched = {"blocks": 3, "arrived_blocks": 3, "disk_blocks": 3}
    loaded = {"blocks": 3, "done": True}
    rank.requests.scheduled([rank.request("r", prefix=12)], [], OwnPages())
    assert told.spans == [("r", "load", loaded), ("r", "fetch", fetched)]


def test_a_cancelled_load_has_no_span(make_rank: MakeRank) -> None:
    rank = make_rank()
    hashes = hashes_of("a", 3)
    assert rank.store(hashes, [1, 2, 3])
    told = follow(rank, "r")
    assert rank.lookup("r", hashes) == [3]
    assert rank.side.load("r", hashes, [7, 8, 9])
    assert len(traced_transfers(rank.requests.traced)) == 1
    assert rank.side.cancel("r")
    assert not traced_transfers(rank.requests.traced)
    assert rank.load("r", hashes, [7, 8, 9])
    assert [(rid, name) for rid, name, _ in told.spans] == [("r", "load")]


def test_spans_are_within_sglangs_own_where_it_traces_the_request() -> None:
    context_of = in_sglangs_spans()

    def request(**trace: object) -> Any:
        stats = SimpleNamespace(trace_ctx=SimpleNamespace(**trace))
        return SimpleNamespace(sglang=SimpleNamespace(time_stats=stats))

    own = object()
    assert context_of(request(tracing_enable=True, root_span_context=own)) is own
    assert context_of(request(tracing_enable=False)) is None
