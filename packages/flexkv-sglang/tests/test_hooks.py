# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for a disk are out of SGLang's sight; nothing else of its queue changes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hooked_side import Request, Side, rids
from sglang_requests import Grammars
from stage_queues import QueuedLinks, Wires

from flexkv.engine.choice.cost import Span
from flexkv.types.tenants import tenant_number
from flexkv_sglang import hooks
from flexkv_sglang.delayed_offloads import AT_ONCE
from flexkv_sglang.stages import StagedLoads
from flexkv_sglang.waiting import WINDOW


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Side:
    made = Side("b", "d")
    monkeypatch.setattr(hooks, "_side", made)
    monkeypatch.setattr(
        hooks, "missing_pages", lambda tree, request, **_: f"pages of {request.rid}"
    )
    return made


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each rest would have been."""
    made: list[float] = []
    monkeypatch.setattr(hooks, "time", SimpleNamespace(sleep=made.append))
    return made


def scheduler_of(side: Any, *rids: str) -> Any:
    queue = [Request(rid, side) for rid in rids]
    scheduler = SimpleNamespace(
        waiting_queue=queue,
        grammar_manager=Grammars(),
        tree_cache=None,
        device="cpu",
        last_batch=None,
    )
    scheduler._add_request_to_queue = queue.append
    return scheduler


def running(*rids: str) -> Any:
    return SimpleNamespace(is_empty=lambda: not rids)


NOTHING = (None, running())


def test_a_request_that_waits_is_out_of_sight_and_keeps_its_place(side: Side) -> None:
    scheduler = scheduler_of(side, "a", "b", "c", "d", "e")
    seen: list[list[str]] = []

    def take_two(scheduler: Any) -> tuple[None, Any]:
        seen.append(rids(scheduler.waiting_queue))
        retracted = Request("z", side)
        scheduler.waiting_queue = [*scheduler.waiting_queue[2:], retracted]
        return NOTHING

    assert hooks.schedule(take_two, scheduler) == NOTHING
    assert seen == [["a", "c", "e"]]
    assert rids(scheduler.waiting_queue) == ["b", "d", "e", "z"]


def test_requests_come_back_when_sglang_raises(side: Side) -> None:
    scheduler = scheduler_of(side, "a", "b")

    def fail(_: Any) -> None:
        raise RuntimeError("SGLang's")

    with pytest.raises(RuntimeError, match="SGLang's"):
        hooks.schedule(fail, scheduler)
    assert rids(scheduler.waiting_queue) == ["a", "b"]


@pytest.mark.parametrize("raises", [False, True])
def test_a_request_whose_grammar_is_compiled_is_looked_up_before_sglang_sees_it(
    side: Side, raises: bool
) -> None:
    scheduler = scheduler_of(side)
    ready = [Request(rid, side) for rid in "ab"]
    compiling = Request("c", side)
    scheduler.grammar_manager = Grammars(ready, [compiling])
    seen: list[list[str]] = []

    def choose(scheduler: Any) -> tuple[None, Any]:
        assert not scheduler.grammar_manager.has_waiting_grammars()
        seen.append(rids(scheduler.waiting_queue))
        if raises:
            raise RuntimeError("SGLang's")
        return NOTHING

    with pytest.raises(RuntimeError) if raises else contextlib.nullcontext():
        hooks.schedule(choose, scheduler)
    assert side.asked == ["a", "b"]
    assert seen == [["a"]]
    assert rids(scheduler.waiting_queue) == ["a", "b"]
    assert scheduler.grammar_manager.grammar_queue == [compiling]


LAST = "a batch whose tokens are to be sent"
BATCH = SimpleNamespace(reqs=[])


@pytest.mark.parametrize(
    ("queue", "made", "last_batch", "rests"),
    [
        ("bd", NOTHING, None, 1),
        ("ab", (BATCH, running()), None, 0),
        ("b", (None, running("c")), None, 0),
        ("b", NOTHING, LAST, 0),
        ("a", NOTHING, None, 0),
    ],
)
def test_sglang_rests_where_all_wait_for_a_disk(
    side: Side,
    slept: list[float],
    *,
    queue: str,
    made: tuple[Any, Any],
    last_batch: Any,
    rests: int,
) -> None:
    scheduler = scheduler_of(side, *queue)
    scheduler.last_batch = last_batch
    assert hooks.schedule(lambda scheduler: made, scheduler) == made
    assert len(slept) == rests


def test_each_request_is_looked_up_once_before_its_turn(side: Side) -> None:
    scheduler = scheduler_of(side, "a", "b")
    for _ in range(2):
        hooks.schedule(lambda scheduler: NOTHING, scheduler)
    assert side.asked == ["a", "b"]


def test_a_request_that_cannot_be_matched_is_looked_up_at_its_turn(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    def match(tree: object, request: Request, **_: object) -> str:
        if request.rid == "b":
            raise RuntimeError("on this rank alone")
        return f"pages of {request.rid}"

    monkeypatch.setattr(hooks, "missing_pages", match)
    hooks.schedule(lambda scheduler: NOTHING, scheduler_of(side, "a", "b", "c"))
    assert side.asked == ["a", "c"]
    assert side.went_on == 1


@pytest.mark.parametrize(("tokens", "steps"), [(100, ["abcd"]), (1 << 14, ["ab", "cd"])])
def test_a_step_searches_for_a_bounded_number_of_tokens(
    side: Side, tokens: int, steps: list[str]
) -> None:
    scheduler = scheduler_of(side)
    scheduler.waiting_queue = [Request(rid, side, tokens) for rid in "abcd"]
    for step in steps:
        before = len(side.asked)
        hooks.schedule(lambda scheduler: NOTHING, scheduler)
        assert "".join(side.asked[before:]) == step


@pytest.mark.parametrize(("streaming", "asked"), [(True, []), (False, ["a"])])
def test_a_streaming_session_has_its_pages_elsewhere(
    side: Side, streaming: bool, asked: list[str]
) -> None:
    scheduler = scheduler_of(side)
    session = SimpleNamespace(streaming=streaming)
    scheduler.waiting_queue = [Request("a", side, session=session)]
    hooks.schedule(lambda scheduler: NOTHING, scheduler)
    assert side.asked == asked


def test_sglang_does_not_rest_while_pages_are_left_to_look_up(
    side: Side, slept: list[float]
) -> None:
    side.looks_ahead = True
    hooks.schedule(lambda scheduler: NOTHING, scheduler_of(side, "b"))
    assert slept == []


def test_flexkvs_ranks_agree_by_one_number(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    def sglangs(wrapper: object, lengths: list[int], num_pages: int) -> str:
        return "SGLang's"

    assert hooks.agree_on_prefix(sglangs, object(), [7], num_pages=9) == 6
    monkeypatch.setattr(hooks, "_side", None)
    assert hooks.agree_on_prefix(sglangs, object(), [7], num_pages=9) == "SGLang's"


@pytest.mark.parametrize("serves", [True, False])
def test_a_decode_server_polls_before_it_looks_at_its_queues(
    side: Side, monkeypatch: pytest.MonkeyPatch, serves: bool
) -> None:
    monkeypatch.setattr(hooks, "_side", side if serves else None)
    tree = SimpleNamespace(check_hicache_events=lambda: side.asked.append("poll"))
    early = SimpleNamespace(queue=[SimpleNamespace(req=Request("early", side))])
    scheduler = SimpleNamespace(
        tree_cache=tree,
        waiting_queue=[Request("waits", side)],
        disagg_decode_prealloc_queue=early,
    )
    assert hooks.decode(lambda scheduler: side.asked.append("queues"), scheduler) is None
    assert side.asked == ["poll"] * serves + ["queues"]
    assert side.counted == [([], ["waits", "early"])] * serves


def test_sglang_learns_how_much_of_a_hit_lower_tiers_gave(side: Side) -> None:
    request = SimpleNamespace(rid="b", storage_hit_length=7)
    assert hooks.load_back(lambda wrapper, request: (16, 3), object(), request) == (16, 3)
    assert request.storage_hit_length == 12
    request.rid = "a"
    hooks.load_back(lambda wrapper, request: (0, 3), object(), request)
    assert request.storage_hit_length == 0


class Loading(SimpleNamespace):
    """SGLang's wrapper of the linker and its tree, in which one request loads in batch 3."""

    def __init__(self, fails: bool) -> None:
        super().__init__(inflight_load_rids=[], inflight_load_index=-1, fails=fails, marked=[])

    def load_back(self, request: Any) -> int:
        self.inflight_load_rids.append(request.rid)
        self.inflight_load_index = 3
        return 1

    def find_failed(self, wrapper: object) -> list[str]:
        rids, self.inflight_load_rids = self.inflight_load_rids, []
        return rids if self.fails else []

    def finish_external_linker_loads(self, requests: Sequence[Any]) -> list[Any]:
        failed = hooks.finish_loads(self.find_failed, self)
        self.marked += [each for each in requests if each.rid in failed]
        return list(self.marked)


def test_without_stages_sglang_learns_of_failed_loads_at_once(side: Side) -> None:
    wrapper = Loading(fails=True)
    request = SimpleNamespace(rid="a", skip_radix_cache_insert=False)
    hooks.load_back(lambda wrapper, request: wrapper.load_back(request), wrapper, request)
    assert hooks.finish_loads(wrapper.find_failed, wrapper) == ["a"]
    assert not request.skip_radix_cache_insert


@pytest.mark.parametrize("fails_on", [None, 0, 1])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_stages_learn_of_failed_loads_with_the_result_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, fails_on: int | None, in_chunks: bool
) -> None:
    wires = Wires(2)
    stages = []
    for number in range(2):
        side = Side()
        side.staged = StagedLoads(QueuedLinks(wires, number))
        request = SimpleNamespace(rid="a", skip_radix_cache_insert=False)
        wrapper = Loading(fails=number == fails_on)
        monkeypatch.setattr(hooks, "_side", side)
        hooks.load_back(lambda wrapper, request: wrapper.load_back(request), wrapper, request)
        assert hooks.finish_loads(wrapper.find_failed, wrapper) == []
        assert hooks.finish_loads(wrapper.find_failed, wrapper) == []  # a batch without loads
        assert request.skip_radix_cache_insert
        stages.append((side, request, wrapper))
    for side, request, wrapper in stages:
        monkeypatch.setattr(hooks, "_side", side)
        scheduler = SimpleNamespace(
            tree_cache=wrapper,
            chunked_req=request if in_chunks else None,
            _pending_chunked_abort_req=None,
        )
        for number in (2, 3, 3):  # the batch runs on as one that decodes
            batch = SimpleNamespace(hicache_consumer_index=number)
            given = hooks.process_result(lambda *given: given, scheduler, batch, "result")
            assert given == (scheduler, batch, "result")
        assert side.known == [3]
        failed = fails_on is not None
        assert wrapper.marked == ([request] if failed else [])
        assert request.skip_radix_cache_insert == failed
        aborted = scheduler._pending_chunked_abort_req
        assert aborted is (request if failed and in_chunks else None)


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_request_to_clear_the_storage_clears_flexkv(
    side: Side, monkeypatch: pytest.MonkeyPatch, succeeds: bool
) -> None:
    structs = ModuleType("sglang.srt.managers.io_struct")
    structs.ClearHiCacheReqOutput = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, structs.__name__, structs)
    monkeypatch.setattr(side, "clear", lambda: succeeds, raising=False)
    answer = hooks.clear_storage(lambda *_: "SGLang's", object(), object())
    assert answer == SimpleNamespace(success=succeeds)
    monkeypatch.setattr(hooks, "_side", None)
    assert hooks.clear_storage(lambda *_: "SGLang's", object(), object()) == "SGLang's"


def test_one_request_without_a_disk_is_scheduled_as_ever(side: Side) -> None:
    side.may_wait = False
    scheduler = scheduler_of(side, "a")
    queue = scheduler.waiting_queue
    hooks.schedule(lambda scheduler: NOTHING, scheduler)
    assert scheduler.waiting_queue is queue
    assert side.asked == []


@pytest.mark.parametrize(("rids", "is_loading"), [("ab", False), ("a", True)])
def test_requests_that_may_share_pages_are_looked_up(
    side: Side, rids: str, is_loading: bool
) -> None:
    side.may_wait, side.is_loading = False, is_loading
    hooks.schedule(lambda scheduler: NOTHING, scheduler_of(side, *rids))
    assert side.asked == [*rids]


class Untouched:
    """A waiting request that remembers being looked at."""

    looked_at: list[str]

    def __getattr__(self, name: str) -> Any:
        Untouched.looked_at.append(name)
        raise AttributeError(name)


@pytest.mark.parametrize("waiting", [(), ("b", "d")], ids=["none held", "some held"])
def test_a_step_looks_at_the_first_requests_alone(
    monkeypatch: pytest.MonkeyPatch, waiting: tuple[str, ...]
) -> None:
    """While the batch is full, however many wait behind them."""
    side = Side(*waiting)
    monkeypatch.setattr(hooks, "_side", side)
    monkeypatch.setattr(
        hooks, "missing_pages", lambda tree, request, **_: f"pages of {request.rid}"
    )
    monkeypatch.setattr(side, "scheduled", lambda *_: None)
    Untouched.looked_at = []
    names = ["a", "b", "c", "d", *(f"r{number}" for number in range(WINDOW - 4))]
    scheduler = scheduler_of(side, *names)
    scheduler.waiting_queue += [Untouched() for _ in range(10_000)]
    queue, before, seen = scheduler.waiting_queue, [*scheduler.waiting_queue], []
    hooks.schedule(lambda scheduler: seen.extend(scheduler.waiting_queue) or NOTHING, scheduler)
    assert Untouched.looked_at == []
    assert side.asked == names
    assert scheduler.waiting_queue is queue
    assert queue == before
    assert seen == [each for each in before if vars(each).get("rid") not in waiting]


def test_requests_behind_the_first_keep_their_order(side: Side) -> None:
    """Also if SGLang takes some of them and puts others back."""
    names = [f"r{number}" for number in range(WINDOW + 3)]
    side.held_back = ("r1", "r3")
    scheduler = scheduler_of(side, *names)

    def take(scheduler: Any) -> Any:
        scheduler.waiting_queue = [*scheduler.waiting_queue[2:-1], Request("again", side)]
        return NOTHING

    hooks.schedule(take, scheduler)
    left = [each for each in names if each not in ("r0", "r2", names[-1])]
    assert rids(scheduler.waiting_queue) == [*left, "again"]


def test_requests_that_wait_come_back_though_sglang_has_sorted_its_queue(side: Side) -> None:
    names = "abcdefg"
    scheduler = scheduler_of(side, *names)

    def take_one(scheduler: Any) -> Any:
        scheduler.waiting_queue.reverse()
        scheduler.waiting_queue = scheduler.waiting_queue[1:]
        return NOTHING

    hooks.schedule(take_one, scheduler)
    assert rids(scheduler.waiting_queue) == ["b", "d", "f", "e", "c", "a"]


def request_of(name: str, **attributes: Any) -> Any:
    """A request to SGLang's scheduler."""
    return type(name, (SimpleNamespace,), {})(**attributes)


@pytest.mark.parametrize("flushes", [0, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_other_weights_end_what_was_stored(side: Side, fails: bool, flushes: int) -> None:
    side.page_keys.flushes = 3
    request = request_of("UpdateWeightFromDiskReqInput")

    def update(dispatcher: object, given: object) -> object:
        side.page_keys.flushes += flushes
        if fails:
            raise RuntimeError("half of the weights are there")
        return given

    if fails:
        with pytest.raises(RuntimeError):
            hooks.dispatch(update, object(), request)
    else:
        assert hooks.dispatch(update, object(), request) is request
    assert side.weights == [flushes > 0]


@pytest.mark.parametrize(
    ("request_", "changes"),
    [
        (request_of("CheckWeightsReqInput", action="reset_tensors"), True),
        (request_of("CheckWeightsReqInput", action="one of a later release"), True),
        (request_of("CheckWeightsReqInput", action="checksum"), False),
        (request_of("CheckWeightsReqInput"), True),
        (request_of("RpcReqInput", method="sync_policy"), True),
        (request_of("RpcReqInput", method="save_sharded_model"), False),
        (request_of("UpdateWeightVersionReqInput"), True),
        (request_of("EndWeightUpdateReqInput"), True),
        (request_of("ReqInputOfALaterRelease"), True),
        (request_of("TokenizedGenerateReqInput"), False),
        (request_of("GetWeightsByNameReqInput"), False),
        (request_of("LoadLoRAAdapterReqInput"), False),
    ],
)
def test_a_request_counts_as_a_change_unless_it_is_known(
    side: Side, request_: object, changes: bool
) -> None:
    assert hooks.dispatch(lambda dispatcher, given: given, object(), request_) is request_
    assert bool(side.weights) == changes


def test_all_requests_to_the_scheduler_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """`compat-ci/known.toml` compares their names with SGLang's own."""
    hooked: dict[str, Any] = {}
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookType = SimpleNamespace(AROUND="around")  # type: ignore[attr-defined]
    registry.HookRegistry = SimpleNamespace(  # type: ignore[attr-defined]
        register=lambda target, hook, _: hooked.update({target: hook}), apply_hooks=lambda: None
    )
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setattr(hooks, "_side", None)
    hooks.serve(Side())  # type: ignore[arg-type]
    assert hooked["sglang.utils.TypeBasedDispatcher.__call__"] is hooks.dispatch
    (release,) = (name for name in hooked if name.endswith(".release_memory_occupation"))
    assert hooked[release] is hooks.release_memory


@pytest.mark.parametrize(("device", "spans"), [("cpu", [[Span(16, 40)]]), ("cuda", [])])
def test_batches_are_measured_where_their_end_is_seen(
    side: Side, device: str, spans: list[list[Span]]
) -> None:
    scheduler = scheduler_of(side)
    scheduler.device = device
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid="a", prefix_len=16, extend_end=40)])
    hooks.schedule(lambda scheduler: (batch, "running"), scheduler)
    assert side.spans == spans


def test_a_batch_is_counted_with_those_that_still_wait(side: Side) -> None:
    scheduler = scheduler_of(side, "a", "b")

    def take_a(scheduler: Any) -> tuple[Any, str]:
        scheduler.waiting_queue = []
        return SimpleNamespace(reqs=[SimpleNamespace(rid="a", prefix_len=0, extend_end=4)]), ""

    hooks.schedule(take_a, scheduler)
    assert side.counted == [(["a"], ["b"])]


@pytest.mark.parametrize(("session", "own"), [(None, ["a", "b", "c"]), ("streamed", [])])
def test_the_pages_that_sglang_has_itself_are_known(
    side: Side, session: str | None, own: list[str]
) -> None:
    scheduler = scheduler_of(side)
    core = SimpleNamespace(get_hash_values={7: ["c"]}.get)
    scheduler.tree_cache = SimpleNamespace(
        get_prefix_hash_values={7: ["a", "b"]}.get, tree_core=core
    )
    request = SimpleNamespace(rid="a", prefix_len=12, extend_end=16, last_node=7, session=session)
    hooks.schedule(lambda scheduler: (SimpleNamespace(reqs=[request]), ""), scheduler)
    assert side.own == [own]


@pytest.mark.parametrize("leads", [False, True])
def test_a_step_without_prompts_is_followed_where_the_cache_is(side: Side, leads: bool) -> None:
    side.leads = leads
    hooks.schedule(lambda scheduler: NOTHING, scheduler_of(side, "a"))
    assert side.counted == [([], ["a"])] * leads


@pytest.mark.parametrize(("parents", "before"), [([1, 5], "b"), ([1], None)])
@pytest.mark.parametrize(("salt", "tenant"), [("team", tenant_number("team")), (None, 0)])
def test_pages_are_stored_behind_those_that_they_build_on_for_their_tenant(
    side: Side, parents: list[int], before: str | None, salt: str | None, tenant: int
) -> None:
    path = tuple(SimpleNamespace(parent_id=parent) for parent in parents)
    core = SimpleNamespace(
        prefetch_anchor_info={7: ("key", salt)}.get,
        collect_path_info=lambda nodes: (path,) * (nodes == [7]),
        get_last_hash_value={1: None, 5: "b"}.get,
    )
    wrapper = SimpleNamespace(cache=SimpleNamespace(tree_core=core))
    assert hooks.offload(lambda *given: given[1:], wrapper, 7, ["pages"]) == (7, ["pages"])
    assert side.origin == (before, tenant)


def test_an_unknown_tree_stores_all_the_same(side: Side) -> None:
    assert hooks.offload(lambda *given: "stored", object(), 7, ["pages"]) == "stored"


def test_offloads_that_wait_begin_before_sglang_releases_its_memory(side: Side) -> None:
    count = AT_ONCE + 1
    for node in range(count):
        side.delayed.used(node, 4)
    core = SimpleNamespace(build_external_linker_offload_transfers=lambda node: [node])
    side.delayed.wrapper = SimpleNamespace(
        cache=SimpleNamespace(tree_core=core),
        _offload_node=lambda node, transfers: side.asked.append(f"{node} {transfers}"),
    )
    hooks.release_memory(lambda *_: None, None, SimpleNamespace(tags=["kv_cache"]))
    begun = [f"{node} [{node}]" for node in reversed(range(count))]
    assert side.asked == [*begun, "await copies"]


def test_copies_end_before_sglang_releases_its_memory(side: Side) -> None:
    def release(updater: object, request: str) -> str:
        side.asked.append(request)
        return "released"

    assert hooks.release_memory(release, None, "release") == "released"
    assert side.asked == ["await copies", "release"]


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("tags", [None, [], ["weights"], ["weights", "kv_cache"], ["kv_cache"]])
def test_released_weights_change_if_sglang_keeps_no_copy(
    side: Side, tags: list[str] | None, returns: bool
) -> None:
    side.weights_return = returns

    def release(updater: object, request: Any) -> None:
        if "weights" not in (request.tags or ()):
            side.page_keys.flushes += 1

    hooks.release_memory(release, None, SimpleNamespace(tags=tags))
    lost = not returns and tags != ["kv_cache"]
    assert side.weights == [not tags] * lost
