# SPDX-License-Identifier: Apache-2.0
"""One rank: what is found, loaded and stored, and what SGLang is told of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from sglang_requests import OwnPages
from sglang_world import Rank, hashes_of, same

from flexkv.engine.choice.chooser import Left, LoadChoice, LoadChooser
from flexkv.engine.choice.cost import Span, StepTimer
from flexkv.figures.definitions import sample
from flexkv_sglang.copies import Origin
from packages.inside import cache_of
from packages.inside_adapters import mover_of, stores_of_worker, worker_of

MakeRank = Callable[..., Rank]


def schedule(rank: Rank, *rids: str, waiting: Sequence[str] = ()) -> None:
    """SGLang computes requests of these ids next."""
    batch, queue = ([rank.request(rid, range(9)) for rid in each] for each in (rids, waiting))
    rank.requests.scheduled(batch, queue, OwnPages())


def test_a_prefix_is_found_up_to_its_first_missing_page(make_rank: MakeRank) -> None:
    rank = make_rank()
    hashes = hashes_of("a", 6)
    rank.store(hashes[:2], [1, 2])
    rank.store(hashes[3:5], [4, 5])
    assert rank.lookup("r", hashes) == [2]
    assert rank.lookup("r", hashes[3:]) == [2]
    assert rank.lookup("r", hashes[2:]) == []


def test_what_others_stored_is_a_miss_under_another_hash(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.store(hashes_of("tenant A", 2), [1, 2])
    assert rank.lookup("r", hashes_of("tenant B", 2)) == []


def test_eight_loads_of_one_batch_each_get_their_own(make_rank: MakeRank) -> None:
    rank = make_rank(pages=40)
    stored = []
    for number in range(8):
        pages = [1 + 2 * number, 2 + 2 * number]
        stored.append(rank.fill(pages, seed=number))
        rank.store(hashes_of(f"{number}", 2), pages)
    targets = [[20 + 2 * number, 21 + 2 * number] for number in range(8)]
    for number, target in enumerate(targets):
        assert rank.side.load(f"r{number}", hashes_of(f"{number}", 2), target)
    assert rank.side.start_batch() == 0
    for layer in range(3):
        rank.side.wait_for_layer(layer)
        read = [rank.read(target) for target in targets]
        # K and V of the layers so far.
        for found, wanted in zip(read, stored, strict=True):
            assert same(found[: 2 * (layer + 1)], wanted[: 2 * (layer + 1)])
    assert rank.side.finish_batch()


def test_a_layer_waits_for_its_part_and_no_more(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank()
    hashes = hashes_of("a", 2)
    rank.store(hashes, [1, 2])
    mover = type(mover_of(worker_of(rank.side)))
    held: list[int] = []
    hold = mover.hold

    def count(self: Any, ticket: int, stream: int) -> Any:
        held.append(ticket)
        return hold(self, ticket, stream)

    monkeypatch.setattr(mover, "hold", count)
    assert rank.side.load("r", hashes, [3, 4])
    rank.side.start_batch()
    counts = []
    for layer in (0, 0, 1, 2):
        rank.side.wait_for_layer(layer)
        counts.append(len(held))
    assert counts == [1, 1, 2, 3]
    assert rank.side.finish_batch()


def test_a_batch_without_loads_waits_for_none(make_rank: MakeRank) -> None:
    assert make_rank().side.start_batch() == -1


def test_a_load_of_what_is_gone_is_refused(make_rank: MakeRank) -> None:
    rank = make_rank()
    hashes = hashes_of("a", 2)
    rank.store(hashes, [1, 2])
    assert not rank.side.load("r", hashes_of("a", 3), [3, 4, 5])
    assert rank.side.start_batch() == -1


def test_a_cancelled_load_writes_nothing_and_holds_nothing(make_rank: MakeRank) -> None:
    rank = make_rank()
    hashes = hashes_of("a", 2)
    rank.store(hashes, [1, 2])
    before = rank.fill([3, 4], seed=5)
    assert rank.side.load("r", hashes, [3, 4])
    assert rank.side.cancel("r")
    assert not rank.side.cancel("r")
    assert rank.side.start_batch() == -1
    assert same(rank.read([3, 4]), before)
    cache = cache_of(rank.side)
    assert cache is not None
    assert not cache.status.under_way


def test_a_load_that_cannot_begin_fails_and_its_blocks_are_dropped(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank()
    hashes = hashes_of("a", 2)
    rank.store(hashes, [1, 2])

    def refuse(*_: object, **__: object) -> int:
        raise OSError("no copies today")

    with monkeypatch.context() as patch:
        patch.setattr(type(mover_of(worker_of(rank.side))), "submit", refuse)
        assert not rank.load("r", hashes, [3, 4])
    assert rank.lookup("r", hashes) == []
    assert rank.store(hashes, [1, 2])
    assert rank.load("r", hashes, [3, 4])


def test_a_forward_pass_that_could_not_wait_counts_as_failed(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank()
    hashes = hashes_of("a", 2)
    rank.store(hashes, [1, 2])

    def refuse(_: str) -> None:
        raise OSError("no waiting today")

    with monkeypatch.context() as patch:
        patch.setattr(worker_of(rank.side), "wait_for_layer", refuse)
        assert not rank.load("r", hashes, [7, 8])
    assert rank.load("r", hashes, [7, 8])


def test_offloads_end_in_the_order_of_their_calls(make_rank: MakeRank) -> None:
    rank = make_rank()
    hashes = hashes_of("a", 4)
    rank.store(hashes[:2], [1, 2])
    rank.side.offload(hashes[:2], lambda: [1, 2])  # has ended as soon as it began
    rank.side.offload(hashes[2:], lambda: [3, 4])
    rank.side.offload(hashes, lambda: [1, 2, 3, 4])
    told = []
    while len(told) < 3:
        told += [rank.side.take_offload() for _ in range(rank.side.ended_offloads())]
    assert told == [True, True, True]
    assert rank.lookup("r", hashes) == [4]


def test_pages_that_are_stored_already_are_not_named(make_rank: MakeRank) -> None:
    """On a GPU, to read their numbers waits for its work."""

    def fail() -> list[int]:
        raise AssertionError("nobody copies them")

    rank = make_rank()
    hashes = hashes_of("a", 3)
    rank.store(hashes, [1, 2, 3])
    rank.side.offload(hashes[1:], fail)
    assert rank.side.ended_offloads() == 1
    assert rank.side.take_offload()


def test_pages_that_are_stored_in_part_are_copied_in_part(make_rank: MakeRank) -> None:
    rank = make_rank()
    hashes = hashes_of("a", 5)
    wanted = rank.fill([1, 2, 3, 4, 5], seed=1)
    rank.store(hashes[1:3], [2, 3])
    rank.fill([2, 3], seed=2)  # would be wrong bytes
    assert rank.store(hashes, [1, 2, 3, 4, 5])
    assert rank.lookup("r", hashes) == [5]
    assert rank.load("r", hashes, [6, 7, 8, 9, 10])
    assert same(rank.read([6, 7, 8, 9, 10]), wanted)


def test_what_finds_no_room_is_not_called_stored(make_rank: MakeRank) -> None:
    rank = make_rank(pages=300)
    cache = cache_of(rank.side)
    assert cache is not None
    count = cache.info.num_slots + 1
    assert not rank.store(hashes_of("a", count), [1 + i % 299 for i in range(count)])
    assert rank.store(hashes_of("b", 2), [1, 2])


def test_after_a_reset_nothing_writes_and_the_blocks_are_still_there(make_rank: MakeRank) -> None:
    rank = make_rank()
    hashes = hashes_of("a", 2)
    stored = rank.fill([1, 2], seed=1)
    rank.store(hashes_of("other", 2), [5, 6])
    assert rank.side.load("other", hashes_of("other", 2), [7, 8])
    rank.side.offload(hashes, lambda: [1, 2])
    rank.side.reset()
    assert not stores_of_worker(worker_of(rank.side))  # none was left to end by itself
    assert rank.side.ended_offloads() == 0
    assert rank.side.start_batch() == -1
    rank.fill([1, 2], seed=2)  # SGLang uses the pages for others
    assert rank.load("r", hashes, [3, 4])
    assert same(rank.read([3, 4]), stored)


def test_what_other_weights_computed_is_not_found(make_rank: MakeRank) -> None:
    rank = make_rank()
    hashes = hashes_of("a", 2)
    rank.store(hashes, [1, 2])
    rank.side.weights_changed(flushed=True)
    assert rank.lookup("r", hashes) == []
    rank.store(hashes, [3, 4])
    assert rank.lookup("r", hashes) == [2]


def test_what_was_computed_behind_pages_of_other_weights_is_not_found_after_a_flush(
    make_rank: MakeRank,
) -> None:
    """SGLang keeps its own pages over an update of weights, until it is told to flush them."""
    rank = make_rank()
    hashes = hashes_of("a", 4)
    rank.store(hashes[:2], [1, 2])
    rank.side.weights_changed(flushed=False)
    rank.store(hashes[2:], [3, 4])
    assert rank.lookup("r", hashes[2:]) == [2]
    rank.side.reset()
    assert rank.lookup("r", hashes[2:]) == []
    # From here on, SGLang computes all pages anew.
    rank.store(hashes, [5, 6, 7, 8])
    rank.side.reset()
    assert rank.lookup("r", hashes) == [4]


def test_short_hits_are_computed(make_rank: MakeRank) -> None:
    rank = make_rank(settings={"min_load_tokens": 9})
    rank.store(hashes_of("a", 2), [1, 2])
    rank.store(hashes_of("b", 3), [1, 2, 3])
    assert rank.lookup("r", hashes_of("a", 2)) == []
    assert rank.lookup("r", hashes_of("b", 3)) == [3]


def test_an_error_of_the_cache_is_a_miss(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank()
    hashes = hashes_of("a", 2)
    rank.store(hashes, [1, 2])

    def fail(*_: object) -> Any:
        raise RuntimeError("a bug")

    for name in ("lookup", "load", "store"):
        monkeypatch.setattr(type(cache_of(rank.side)), name, fail)
    assert rank.lookup("r", hashes) == []
    assert not rank.side.load("r", hashes, [3, 4])
    assert not rank.store(hashes_of("b", 1), [5])


def test_figures_count_what_was_asked_and_loaded(make_rank: MakeRank) -> None:
    rank = make_rank()
    hashes = hashes_of("a", 2)
    for _ in range(2):  # as SGLang does as long as the request waits
        rank.lookup("r", hashes)
    schedule(rank, "r")
    rank.store(hashes, [1, 2])
    rank.lookup("s", hashes)
    rank.load("s", hashes, [3, 4])
    schedule(rank, "s")
    rank.side.ended_offloads()
    samples = rank.side.take_samples()
    assert samples["query_tokens:host"] == 2 * 9
    assert samples["hit_tokens:host"] == 8
    assert samples["stored_blocks:host"] == 2
    size = rank.pages.layout.block_bytes
    assert samples["copied_bytes:device:load"] == 2 * size
    assert samples["copied_bytes:device:store"] == 2 * size


def test_an_error_counts_once(make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = make_rank()

    def fail(*_: object, **__: object) -> None:
        raise ValueError("an error of a test")

    monkeypatch.setattr(type(cache_of(rank.side)), "lookup", fail)
    assert not rank.lookup("r", hashes_of("a", 2))
    assert rank.side.take_samples()[sample("failures", "internal", "")] == 1


def test_a_prefix_outlives_what_builds_on_it(make_rank: MakeRank) -> None:
    rank = make_rank(pages=300)
    cache = cache_of(rank.side)
    assert cache is not None
    hashes = hashes_of("a", 4)
    rank.store(hashes[:2], [1, 2])
    rank.side.comes_from(Origin(hashes[1]))
    rank.store(hashes[2:], [3, 4])
    # Others fill host memory but for two blocks, and then need one more.
    count = cache.info.num_slots - 3
    rank.store(hashes_of("b", count), range(5, 5 + count))
    assert rank.lookup("r", hashes) == [3]


def test_pages_behind_an_unknown_page_are_stored(make_rank: MakeRank) -> None:
    rank = make_rank()
    hashes = hashes_of("a", 4)
    rank.side.comes_from(Origin(hashes[1]))
    assert rank.store(hashes[2:], [3, 4])
    assert rank.lookup("r", hashes[2:]) == [2]
    rank.store(hashes_of("b", 1), [5])  # not behind what the call before was
    assert rank.lookup("r", hashes_of("b", 1)) == [1]


def test_what_is_slower_to_load_than_to_compute_is_computed(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank()
    hashes = hashes_of("a", 4)
    rank.store(hashes, [1, 2, 3, 4])
    choose = LoadChoice(1, Left.SLOW)
    monkeypatch.setattr(LoadChooser, "choose_load", lambda *_, **__: choose)
    assert rank.lookup("r", hashes) == [1]
    rank.load("r", hashes[:1], [5])
    schedule(rank, "r")
    samples = rank.side.take_samples()
    assert samples["skipped_tokens:slow"] == 12
    assert samples["query_tokens:host"] == 9


def test_batches_are_timed_until_sglang_polls(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank()
    told: list[object] = []
    monkeypatch.setattr(LoadChooser, "step_begins", lambda _, spans: told.append(spans) or 7)
    monkeypatch.setattr(StepTimer, "ended", lambda _, number: told.append(number))
    rank.side.batch_begins([Span(0, 100)])
    rank.side.ended_offloads()
    rank.side.ended_offloads()
    assert told == [0, [Span(0, 100)], 7, 0]


def test_what_cannot_be_ended_keeps_nothing_else_from_its_end(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank()
    side: Any = rank.side
    closed: list[float] = []

    def fail() -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(side.requests.waiting, "end_fetches", fail)
        patch.setattr(side.requests.sessions, "note", fail)
        patch.setattr(cache_of(side), "close", closed.append)
        side.close(2.5)
    assert closed == [2.5]
