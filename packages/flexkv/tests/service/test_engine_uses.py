# SPDX-License-Identifier: Apache-2.0
"""What an engine's requests use: no engine makes the service remember without end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice

import pytest

from flexkv.client import Hold
from flexkv.eviction import RequestContext
from flexkv.service import engine_requests, page
from flexkv.service import messages as wire
from flexkv.service.lobby import RefusalError
from packages.flexkv.tests.service.served import Scheduler, Service, keys_of

Attach = Callable[..., Scheduler]


def records(made: Iterator[int], ended: bool) -> Iterator[wire.ToService]:
    for number in made:
        yield wire.RecordUse([], 0, [], RequestContext(request_id=str(number)))
        if ended:
            yield wire.RequestEnded(str(number), 0)


def pins(made: Iterator[int], ended: bool) -> Iterator[wire.ToService]:
    for number in made:
        yield wire.HoldBlocks(Hold.PIN, keys_of("a", 1), str(number), 5.0)
        if ended:
            yield wire.UnholdBlocks(Hold.PIN, str(number), [])


def fetches(made: Iterator[int], ended: bool) -> Iterator[wire.ToService]:
    for number in made:
        yield wire.Fetch(number, [], False, None, 0, 0)
        if ended:
            yield wire.EndFetch(number)


@pytest.mark.parametrize("make", [records, pins, fetches])
def test_an_engine_that_ends_nothing_is_refused(
    service: Service,
    attach: Attach,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Iterator[int], bool], Iterator[wire.ToService]],
) -> None:
    """One that ends what it begins may begin more."""
    monkeypatch.setattr(engine_requests, "_MOST_NAMES", 4)
    monkeypatch.setattr(page, "FETCH_ROWS", 4)
    attach(service)
    for message in make(iter(range(10)), True):
        service.engine.handle(message)
    *first, fifth = islice(make(count(10), False), 5)
    for message in first:
        service.engine.handle(message)
    with pytest.raises(RefusalError, match=r"more than 4|before another has ended"):
        service.engine.handle(fifth)


@pytest.mark.parametrize("field", ["prompt", "others"])
def test_a_prompt_without_an_end_is_refused(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setattr(engine_requests, "_MOST_PROMPT", 8)
    attach(service)
    keys = keys_of("a", 4)
    prompt, others = (keys, []) if field == "prompt" else ([], keys)
    for _ in range(2):
        service.engine.handle(wire.RecordUse(prompt, 0, others, None))
    with pytest.raises(RefusalError, match="more than 8 blocks"):
        service.engine.handle(wire.RecordUse(prompt, 0, others, None))
