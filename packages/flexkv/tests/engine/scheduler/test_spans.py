# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kept_spans import KeptSpans

from flexkv.client import Ended
from flexkv.engine.scheduler.spans import TracedWork
from flexkv.types.mover import Direction

REQUEST: Any = SimpleNamespace(request_id="r")


def test_what_never_ends_takes_no_room_without_end() -> None:
    told = KeptSpans()
    work = TracedWork(told)
    for number in range(5000):
        work.began(number, REQUEST, number)
    for number in range(5000):
        work.ended(Ended(number, Direction.LOAD, done=True))
    assert [span["blocks"] for _, _, span in told.spans] == [*range(5000 - 4096, 5000)]


def test_nothing_is_kept_where_nobody_asks_for_it() -> None:
    work = TracedWork()
    work.began(1, REQUEST, 1)
    told = work.spans = KeptSpans()
    work.ended(Ended(1, Direction.LOAD, done=True))
    assert told.spans == []
