# SPDX-License-Identifier: Apache-2.0
"""KV events of engines that share one cache: each tells all of it, in full."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page_subscriber import Subscriber, numbers_of, pages_of
from sglang_world import PATIENCE_SECONDS, Rank, hashes_of

from flexkv.types.changes import Medium
from flexkv_sglang.events import Page, decode, encode
from packages.inside import cache_of, stores_of

HOST, DISK = Medium.HOST, Medium.DISK
SLOTS, PROMPTS, PAGES = 64, 24, 4
"""The prompts have more pages than host memory has slots."""

Subscribe = Callable[[str], Subscriber]
Serve = Callable[..., str]
ALL = {page.number: page for i in range(PROMPTS) for page in pages_of(f"prompt {i}", PAGES)}


@pytest.fixture
def subscribe(make_rank: Callable[..., Rank]) -> Subscribe:
    return lambda root: Subscriber(make_rank(settings={"service": root}))


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    return {
        "cpu_cache_gb": SLOTS * 4096 / 2**30,
        "ssd_cache_gb": 1 / 64,
        "ssd_cache_dir": (str(tmp_path / "disk"),),
        "ssd_timeout_seconds": PATIENCE_SECONDS,
    }


def until(condition: Callable[[], bool], *subscribers: Subscriber) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        for each in subscribers:
            each.rank.side.ended_offloads()
            each.listen()


def await_slots(subscriber: Subscriber) -> None:
    """Until the service has granted an engine slots for a prompt."""
    cache = cache_of(subscriber.rank.side)
    until(lambda: len(stores_of(cache).free) >= PAGES, subscriber)


def compute(subscriber: Subscriber) -> None:
    """More than host memory holds, so that some pages are on disk alone."""
    for number in range(PROMPTS):
        await_slots(subscriber)
        subscriber.offload(f"prompt {number}", PAGES)
        subscriber.leave(f"prompt {number}", PAGES)


def on(subscriber: Subscriber, medium: Medium) -> dict[int, Page]:
    """What it was told of the pages that a tier has."""
    return {n: subscriber.pages[each, n] for each, n in subscriber.known if each is medium}


def hear_alike(subscriber: Subscriber, other: Subscriber) -> None:
    """Until both were told the same. Slots that an engine is granted evict pages."""

    def is_alike() -> bool:
        whole = on(other, DISK) == ALL and on(subscriber, DISK) == ALL
        return whole and on(subscriber, HOST) == on(other, HOST) != {}

    until(is_alike, subscriber, other)
    assert on(subscriber, HOST).items() <= ALL.items()


def test_an_engine_tells_in_full_what_another_has_stored(
    serve: Serve, subscribe: Subscribe, disk: dict[str, Any]
) -> None:
    root = serve(**disk)
    one, other = subscribe(root), subscribe(root)
    compute(one)
    hear_alike(other, one)


def test_an_engine_that_begins_tells_in_full_what_was_there(
    serve: Serve, subscribe: Subscribe, disk: dict[str, Any]
) -> None:
    root = serve(**disk)
    one = subscribe(root)
    compute(one)
    hear_alike(subscribe(root), one)


def test_what_was_there_is_told_in_full_once_sglang_has_flushed_its_own(
    serve: Serve, subscribe: Subscribe, disk: dict[str, Any]
) -> None:
    root = serve(**disk)
    one, other = subscribe(root), subscribe(root)
    compute(one)
    hear_alike(other, one)
    other.flush()
    other.pages.clear()
    hear_alike(other, one)


def test_pages_come_after_those_that_they_build_on(serve: Serve, subscribe: Subscribe) -> None:
    root = serve()
    one, other = subscribe(root), subscribe(root)
    await_slots(one)
    one.offload("a", PAGES)
    until(lambda: len(other.known) == PAGES, other)
    assert list(other.pages.values()) == pages_of("a", PAGES)


def test_pages_that_nobody_has_described_are_told_once_sglang_has_them(
    serve: Serve, subscribe: Subscribe
) -> None:
    root = serve()
    one, other = subscribe(root), subscribe(root)
    await_slots(one)
    await_slots(other)
    other.offload("watches", 1)
    until(lambda: len(one.known) == 1, one)
    one.offload("a", 3, told=False)
    one.offload("b", 1)
    until(lambda: len(other.known) == 2, other)
    other.learn("a", 3)
    assert [each.page for each in other.listen()] == pages_of("a", 3)


def test_other_weights_end_what_others_have_described(serve: Serve, subscribe: Subscribe) -> None:
    root = serve()
    one, other = subscribe(root), subscribe(root)
    await_slots(one)
    one.offload("a", 3)
    until(lambda: len(other.known) == 3, other)
    other.rank.side.weights_changed(flushed=True)
    other.listen()
    assert not other.known
    assert one.rank.lookup("r", hashes_of("a", 3)) == [3]
    until(lambda: {number for _, number in one.known} == set(numbers_of("a", 3)), one)


@pytest.mark.parametrize("tokens", [[7], [1, 2**32 - 1], [3, 2**40], [(1, 2), (2, 3)]])
@pytest.mark.parametrize("parent", [None, -5, 2**63 - 1])
def test_a_page_is_read_as_it_was_written(parent: int | None, tokens: list[Any]) -> None:
    text = encode(parent, tokens)
    assert decode(text) == (parent, tokens)
    for damaged in (
        text[:-1],
        b"",
        b"\xc1",
        text.replace(b"\x04", b"\x03").replace(b"\x08", b"\x03"),
    ):
        assert decode(damaged) != (parent, tokens) or damaged == text
