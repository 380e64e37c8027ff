# SPDX-License-Identifier: Apache-2.0
"""What an eviction policy is told of SGLang's requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from policy_checks import UseOrderPolicy
from sglang_requests import OwnPages, Request
from sglang_world import Rank, hashes_of

from flexkv.eviction import POLICIES, RequestContext
from flexkv.figures.definitions import HIT_TOKENS, QUERY_TOKENS, sample
from flexkv_sglang import requests
from packages.inside import cache_of
from packages.inside_adapters import tracked_by_rank

PAGE = 4
PROMPT = list(range(21))
"""Five whole pages and a token."""
HASHES = hashes_of("a", 5)


class Told(UseOrderPolicy):
    """Needs no requests, and lists those that it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.began_with: list[tuple[list[bytes], RequestContext]] = []
        self.ended_with: list[tuple[str, int]] = []
        self.hits: list[bytes] = []

    def began(self, keys: Sequence[bytes], context: RequestContext, now: float) -> None:
        self.began_with.append((list(keys), context))

    def ended(self, request_id: str, output_tokens: int, now: float) -> None:
        self.ended_with.append((request_id, output_tokens))

    def hit(self, key: bytes, used: int, context: RequestContext) -> None:
        self.hits.append(key)
        super().hit(key, used, context)


@dataclass
class World:
    """A rank with that policy, and SGLang's own pages of the prompt."""

    rank: Rank
    told: Told
    pages: OwnPages = field(default_factory=OwnPages)

    def schedule(self, *requests: Request, waiting: Sequence[Request] = ()) -> None:
        """SGLang computes these requests next; uses of their prefixes are counted."""
        self.rank.requests.scheduled(requests, waiting, self.pages)
        self.rank.side.ended_offloads()

    def match(self, request: Request, hashes: Sequence[str], own_tokens: int = 0) -> list[int]:
        """SGLang looks a request up, for which it has these tokens itself."""
        self.rank.requests.matched(request, own_tokens)
        return self.rank.side.lookup(request.rid, hashes)

    def keys(self, hashes: Sequence[str]) -> list[bytes]:
        return list(self.rank.side.keys_of(hashes))


@pytest.fixture
def world(make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch) -> World:
    told = Told()
    monkeypatch.setitem(POLICIES, "lru", lambda slots: told)
    monkeypatch.setattr(requests, "_LOOK_SECONDS", 0.0)
    return World(make_rank(settings={"eviction_policy": "lru"}), told)


def test_the_policy_is_told_of_the_whole_prompt_and_of_all_hits(world: World) -> None:
    side = world.rank.side
    world.rank.store(HASHES[:4], [1, 2, 3, 4])
    world.pages.own = HASHES[:2]
    assert world.rank.lookup("r", HASHES[2:], 8) == [2]
    assert side.load("r", HASHES[2:4], [5, 6])
    world.schedule(world.rank.request("r", PROMPT, 16))
    side.start_batch()
    assert side.finish_batch()
    context = RequestContext(21, 16, "r", stores=True)
    assert world.told.began_with == [(world.keys(HASHES), context)]
    assert sorted(world.told.hits) == sorted(world.keys(HASHES[:4]))


def test_a_request_that_finds_nothing_is_told_too(world: World) -> None:
    assert world.rank.lookup("r", HASHES) == []
    world.schedule(world.rank.request("r", PROMPT))
    assert world.told.began_with == [(world.keys(HASHES), RequestContext(21, 0, "r", stores=True))]


def test_a_request_whose_prompt_sglang_has_is_told_too(world: World) -> None:
    world.rank.store(HASHES, [1, 2, 3, 4, 5])
    world.rank.lookup("r", HASHES)  # before another request computed its prompt
    world.pages.own = HASHES
    world.schedule(world.rank.request("r", PROMPT, 20))
    assert world.told.began_with == [(world.keys(HASHES), RequestContext(21, 20, "r", stores=True))]


def test_a_lookup_before_a_change_of_weights_counts_for_nothing(world: World) -> None:
    world.rank.lookup("r", HASHES)
    world.rank.side.weights_changed(flushed=False)
    world.pages.own = HASHES[:2]
    world.schedule(world.rank.request("r", PROMPT, 8))
    assert world.told.began_with == [
        (world.keys(HASHES[:2]), RequestContext(21, 8, "r", stores=True))
    ]


def test_chunks_of_a_prompt_are_one_request(world: World) -> None:
    request = world.rank.request("r", PROMPT)
    world.rank.lookup("r", HASHES)
    for _ in range(3):
        world.schedule(request)
        request.prefix_len += 8
    assert len(world.told.began_with) == 1


def test_chunks_report_a_load_once_though_a_report_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.rank.store(HASHES[:2], [1, 2])
    request = world.rank.request("r", PROMPT, 8, params={"flexkv.retain_seconds": 60})
    assert world.rank.lookup("r", HASHES) == [2]
    assert world.rank.side.load("r", HASHES[:2], [5, 6])
    with monkeypatch.context() as patch:
        patch.setattr(cache_of(world.rank.side), "hold", fail)
        with pytest.raises(MemoryError):
            world.schedule(request)
    request.prefix_len = 16
    world.schedule(request)
    assert queried(world) == (21, 8)
    assert len(world.told.began_with) == 1


def test_a_request_loads_though_its_pin_does_not_end(
    make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(settings={"request_options": "unpin"})
    rank.store(HASHES[:2], [1, 2])
    monkeypatch.setattr(cache_of(rank.side), "unhold", fail)
    request = rank.request("r", PROMPT, params={"flexkv.unpin": True})
    with pytest.raises(MemoryError):
        rank.requests.matched(request, 0)
    assert rank.side.lookup("r", HASHES) == [2]


def fail(*_: object) -> None:
    raise MemoryError


def test_an_answer_is_told_when_it_has_ended(world: World) -> None:
    request = Request("r", PROMPT)
    world.schedule(request)
    world.schedule()
    assert world.told.ended_with == []
    request.output_ids.extend([1, 2, 3])
    for _ in range(2):
        world.schedule()
    assert world.told.ended_with == [("r", 3)]


def test_an_answer_is_told_though_its_fetch_does_not_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request("r", PROMPT)
    world.schedule(request)
    request.output_ids.extend([1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(world.rank.requests.waiting, "leave", fail)
        with pytest.raises(MemoryError):
            world.schedule()
    world.schedule()
    assert world.told.ended_with == [("r", 2)]


def test_a_request_that_is_aborted_in_the_queue_has_ended(world: World) -> None:
    request = Request("r", PROMPT)
    world.schedule(request)
    request.is_retracted = True
    world.schedule(waiting=[request])
    assert world.told.ended_with == []
    world.schedule()
    assert world.told.ended_with == [("r", 0)]


def test_a_cancelled_load_is_no_hit(world: World) -> None:
    side = world.rank.side
    world.rank.store(HASHES[:2], [1, 2])
    world.rank.lookup("r", HASHES)
    assert side.load("r", HASHES[:2], [3, 4])
    side.cancel("r")
    world.schedule(world.rank.request("r", PROMPT))
    assert world.told.began_with == [(world.keys(HASHES), RequestContext(21, 0, "r", stores=True))]
    assert world.told.hits == []


def test_pages_that_are_in_no_tree_are_left_out(world: World) -> None:
    world.rank.store(HASHES[2:4], [1, 2])
    side = world.rank.side
    world.rank.lookup("r", HASHES[2:], 8)
    assert side.load("r", HASHES[2:4], [3, 4])
    world.schedule(world.rank.request("r", PROMPT, 16))
    ((keys, context),) = world.told.began_with
    assert (keys, context.hit_tokens) == (world.keys(HASHES[2:]), 16)
    assert sorted(world.told.hits) == sorted(world.keys(HASHES[2:4]))


@pytest.mark.parametrize(
    ("others", "session", "returns"),
    [
        ({"session_id": "chat"}, "\0chat", None),
        ({"session_id": "chat", "tenant": "t", "salt": "s"}, "s\0chat", None),
        ({"params": {"flexkv.session": "own", "flexkv.returns": True}}, "\0own", True),
        ({"session_id": "chat", "params": {"flexkv.returns": False}}, "\0chat", False),
        ({"params": {"other": 1}, "tenant": "t"}, "", None),
    ],
)
def test_what_a_client_says_of_its_conversation(
    world: World, others: dict[str, object], session: str, returns: bool | None
) -> None:
    world.schedule(Request("r", PROMPT, **others))
    ((_, context),) = world.told.began_with
    assert (context.session, context.returns) == (session, returns)


def test_parameters_that_sglang_cannot_pass_are_named(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    params = {"flexkv.store": False, "flexkv.returns": "yes"}
    world.schedule(Request("r", PROMPT, params=params))
    assert world.rank.side.take_samples()["ignored_parameters"] == 2
    (line,) = [each.message for each in caplog.records if "custom_params" in each.message]
    assert line == (
        "custom_params of request r has 'flexkv.store': False, which is ignored, like 1 more; "
        "allowed: flexkv.load, flexkv.max_load_tokens, flexkv.session, flexkv.returns, "
        "flexkv.retain_seconds, flexkv.release, flexkv.priority, "
        "flexkv.demote"
    )


def test_requests_may_only_what_the_settings_allow(
    make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    monkeypatch.setitem(POLICIES, "lru", lambda slots: told)
    settings = {"eviction_policy": "lru", "request_options": "returns"}
    world = World(make_rank(settings=settings), told)
    params = {"flexkv.session": "own", "flexkv.returns": True}
    world.schedule(Request("r", PROMPT, params=params))
    ((_, context),) = told.began_with
    assert (context.session, context.returns) == ("", True)
    assert world.rank.side.take_samples()["ignored_parameters"] == 1


def test_a_request_that_may_not_load_is_no_miss(world: World) -> None:
    world.rank.store(HASHES[:4], [1, 2, 3, 4])
    request = Request("r", PROMPT, params={"flexkv.load": False})
    assert world.rank.requests.limit(request) == 0
    assert world.match(request, HASHES) == []
    world.schedule(request)
    assert queried(world) == (0, 0)
    assert [keys for keys, _ in world.told.began_with] == [world.keys(HASHES)]


def test_a_request_loads_as_many_tokens_as_it_may(world: World) -> None:
    world.rank.store(HASHES[:4], [1, 2, 3, 4])
    request = Request("r", PROMPT, params={"flexkv.max_load_tokens": 11})
    assert world.rank.requests.limit(request) == 11
    assert world.match(request, HASHES) == [2]
    assert world.rank.side.load("r", HASHES[:2], [5, 6])
    request.prefix_len = 8
    world.schedule(request)
    assert queried(world) == (21, 8)


def test_a_request_is_asked_about_once_however_often_it_is_looked_up(world: World) -> None:
    request = Request("r", PROMPT)
    for _ in range(3):
        assert world.match(request, HASHES) == []
    assert world.match(request, HASHES[2:], 8) == []
    world.pages.own = HASHES[:2]
    request.prefix_len = 8
    world.schedule(request)
    assert queried(world) == (13, 0)


def test_hints_of_a_request_are_counted_once(world: World) -> None:
    request = Request("r", PROMPT, session_id="chat")
    for _ in range(3):
        world.match(request, HASHES)
    world.schedule(request)
    assert world.rank.side.take_samples()[sample("hints", "session", "accepted")] == 1


def queried(world: World) -> tuple[float, float]:
    """Tokens that FlexKV was asked for, and those that it had."""
    taken = world.rank.side.take_samples()
    return tuple(  # type: ignore[return-value]
        taken.get(sample(name, "host"), 0) for name in (QUERY_TOKENS.name, HIT_TOKENS.name)
    )


def test_requests_that_leave_the_queue_are_forgotten(world: World) -> None:
    waits = Request("r 0", PROMPT)
    world.match(waits, HASHES)
    for number in range(1, 100):
        world.match(Request(f"r {number}", PROMPT), HASHES)
        world.schedule(waiting=[waits])
    assert list(tracked_by_rank(world.rank.side)) == ["r 0"]
    world.schedule(waits)
    assert [keys for keys, _ in world.told.began_with] == [world.keys(HASHES)]
