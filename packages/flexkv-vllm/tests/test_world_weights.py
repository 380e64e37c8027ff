# SPDX-License-Identifier: Apache-2.0
"""New weights in a running vLLM, whose engine core has its workers exchange them: nothing that the
old weights have computed is found any more."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_world import MakeWorld, World, random_prompt
from injection import InjectedError
from kv_pages import BLOCK_TOKENS
from offloading_world import MakeOffloadingWorld
from subscriber import Subscriber, drain, loadable
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from flexkv.client import Reset
from flexkv_vllm.compat.core import binds_pool

HIT = 6 * BLOCK_TOKENS
CHANGES = ["reload_weights", "load_model", "reset_weights", "apply_model", "method_of_a_trainer"]


def call_workers(method: object, effect: Callable[[], None] = lambda: None) -> None:
    """vLLM's engine core calls `method` in workers on which it has this effect."""
    executor = SimpleNamespace(collective_rpc=lambda *_: effect())
    EngineCore.collective_rpc(SimpleNamespace(model_executor=executor), method)


def change_weights(world: World, method: object = "reload_weights") -> None:
    def exchange() -> None:
        world.weights = b"new"

    call_workers(method, exchange)


def hits(world: World, prompt: list[int]) -> int:
    """Tokens of `prompt` that FlexKV brings, with nothing in vLLM's own prefix cache."""
    world.forget()
    return world.external_tokens[world.generate(prompt)]


@pytest.fixture
def prompt() -> list[int]:
    return random_prompt(random.Random(1), HIT + 5)


@pytest.mark.parametrize("method", CHANGES)
def test_blocks_of_the_old_weights_are_not_found(
    make_world: MakeWorld, prompt: list[int], method: str
) -> None:
    world = make_world(disk_slots=100)
    world.generate(prompt)
    assert hits(world, prompt) == HIT
    change_weights(world, method)
    assert hits(world, prompt) == 0
    assert hits(world, prompt) == HIT
    world.check_outputs()
    assert world.cache.counters.resets == 1


@pytest.mark.parametrize("doubt", [False, True], ids=["sure", "in doubt"])
def test_the_next_engine_finds_blocks_of_the_models_files(
    make_world: MakeWorld, prompt: list[int], *, doubt: bool
) -> None:
    """It begins with the weights of the files again. If weights may have changed before without a
    sign, blocks that look like those of the files may be others."""
    first = make_world(disk_slots=100)
    first.generate(prompt)
    first.settle()
    if doubt:
        call_workers("init_weight_transfer_engine")
    change_weights(first)
    assert hits(first, prompt) == 0
    first.settle()  # its own blocks are on disk, too
    assert hits(first, prompt) == HIT
    first.check_outputs()
    first.close()
    world = make_world(disk_slots=100)
    assert hits(world, prompt) == (0 if doubt else HIT)
    world.check_outputs()


def test_an_error_while_keys_change_finds_no_block_by_the_old_ones(
    make_world: MakeWorld, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(disk_slots=100)
    world.generate(prompt)
    world.settle()
    reset = world.cache.reset

    def reset_and_fail(kind: Reset, *args: str) -> None:
        reset(kind, *args)
        if kind is Reset.RENEW:
            raise InjectedError

    with monkeypatch.context() as patch:
        patch.setattr(world.cache, "reset", reset_and_fail)
        change_weights(world)
    world.forget()
    assert hits(world, prompt) == 0
    world.check_outputs()


def test_a_reset_of_a_user_leaves_nothing_for_the_next_engine(
    make_world: MakeWorld, prompt: list[int]
) -> None:
    first = make_world(disk_slots=100)
    first.generate(prompt)
    first.settle()
    assert first.connector.reset_cache()
    assert hits(first, prompt) == 0
    first.close()
    world = make_world(disk_slots=100)
    assert hits(world, prompt) == 0


@pytest.mark.parametrize("block_tokens", [BLOCK_TOKENS, 2 * BLOCK_TOKENS])
def test_events_take_back_all_blocks_of_the_old_weights(
    make_world: MakeWorld,
    prompt: list[int],
    block_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those on disk, too, which this engine does not find any more, and before it reports blocks of
    the new weights, which have the same hashes."""
    monkeypatch.setattr("flexkv_vllm.events._BLOCKS_PER_CALL", 2)
    world = make_world(events=True, disk_slots=100, block_tokens=block_tokens)
    subscriber = Subscriber(world)
    texts = [prompt, prompt[: 4 * BLOCK_TOKENS] + random_prompt(random.Random(5), HIT)]
    for text in texts:
        world.generate(text)
    drain(subscriber)
    assert subscriber.told == loadable(world)
    assert all(subscriber.told.values())
    change_weights(world)
    world.forget()
    world.generate(texts[1])
    while world.connector.has_pending_push_work():
        world.step()
    drain(subscriber)
    assert subscriber.told == loadable(world)
    assert all(subscriber.told.values())


def load(adapter: LoRARequest, *, fails: bool = False) -> None:
    """vLLM's engine core has workers load an adapter, perhaps again."""

    def add_lora(_: LoRARequest) -> bool:
        if fails:
            raise InjectedError
        return True

    executor = SimpleNamespace(add_lora=add_lora)
    assert EngineCore.add_lora(SimpleNamespace(model_executor=executor), adapter)


def adapted_hits(world: World, prompt: list[int], adapter: LoRARequest) -> int:
    """As `hits`, of a request for this adapter."""
    world.forget()
    request_id = world.add(prompt, adapter=adapter)
    world.run()
    return world.external_tokens[request_id]


@pytest.mark.parametrize("again", ["the same", "others"])
def test_blocks_of_an_adapter_that_is_loaded_again_from_its_path(
    make_world: MakeWorld, prompt: list[int], tmp_path: Path, again: str
) -> None:
    files = tmp_path / "adapter"
    files.mkdir()
    (files / "adapter_model.safetensors").write_bytes(b"low rank")
    adapter = LoRARequest("name", 1, str(files))
    world = make_world(disk_slots=100)
    load(adapter)
    adapted_hits(world, prompt, adapter)
    assert adapted_hits(world, prompt, adapter) == HIT
    if again == "others":
        (files / "adapter_model.safetensors").write_bytes(b"other low rank")
        world.weights = b"new"
    load(adapter)
    assert adapted_hits(world, prompt, adapter) == (HIT if again == "the same" else 0)
    assert adapted_hits(world, prompt, adapter) == HIT
    world.check_outputs()


def test_an_adapter_keeps_its_blocks_if_its_load_fails(
    make_world: MakeWorld, prompt: list[int], tmp_path: Path
) -> None:
    """vLLM then keeps the adapter that it has, and blocks of it go on being stored."""
    (tmp_path / "adapter.safetensors").write_bytes(b"low rank")
    adapter = LoRARequest("name", 1, str(tmp_path / "adapter.safetensors"))
    world = make_world()
    load(adapter)
    adapted_hits(world, prompt, adapter)
    (tmp_path / "adapter.safetensors").write_bytes(b"not a low rank at all")
    with pytest.raises(InjectedError):
        load(adapter, fails=True)
    assert adapted_hits(world, prompt, adapter) == HIT


def test_an_adapter_without_local_files_is_another_one_where_it_is_replaced(
    make_world: MakeWorld, prompt: list[int]
) -> None:
    world = make_world()
    for in_place in (False, True):
        adapter = LoRARequest("name", 1, "someone/something", load_inplace=in_place)
        adapted_hits(world, prompt, adapter)
        load(adapter)
        assert adapted_hits(world, prompt, adapter) == (0 if in_place else HIT)


def profile(worker: Any) -> None:
    """A function of a user, with the name of a harmless method of vLLM."""
    worker.get_model().lm_head.weight.zero_()


class Writes:
    def __call__(self, worker: Any) -> None:
        profile(worker)


@pytest.mark.parametrize(
    "function",
    [profile, functools.partial(profile), Writes()],
    ids=["plain", "partial", "callable"],
)
def test_a_function_changes_weights_whatever_its_name(
    make_world: MakeWorld, prompt: list[int], function: object
) -> None:
    world = make_world()
    world.generate(prompt)
    change_weights(world, function)
    assert hits(world, prompt) == 0
    world.check_outputs()


@pytest.mark.parametrize(
    "method", ["compute_weight_checksums", "profile", "keeps_weights_and_counts"]
)
def test_harmless_calls_keep_all_blocks(
    make_world: MakeWorld, prompt: list[int], method: str
) -> None:
    world = make_world()
    world.generate(prompt)
    call_workers(method)
    assert hits(world, prompt) == HIT


def test_an_exchange_that_failed_may_have_changed_some(
    make_world: MakeWorld, prompt: list[int]
) -> None:
    world = make_world()
    world.generate(prompt)

    def fail() -> None:
        raise InjectedError

    with pytest.raises(InjectedError):
        call_workers("update_weights", fail)
    assert hits(world, prompt) == 0


def test_two_engines_of_a_process_are_reset_once_each(
    make_world: MakeWorld, prompt: list[int]
) -> None:
    worlds = [make_world(), make_world()]
    for world in worlds:
        world.generate(prompt)
    call_workers("update_weights")
    assert [world.cache.counters.resets for world in worlds] == [1, 1]


@pytest.mark.skipif(not binds_pool(), reason="vLLM shows its prefix cache from 0.22 on")
@pytest.mark.parametrize("running", [False, True], ids=["ended", "running"])
def test_nothing_is_stored_behind_blocks_that_vllm_still_has(
    make_world: MakeWorld, running: bool
) -> None:
    """As when weights are updated in flight: vLLM's own prefix cache is not reset. A request that
    runs during the exchange may have filled no block yet."""
    world = make_world()
    start = random_prompt(random.Random(2), BLOCK_TOKENS - 2 if running else HIT)
    first = world.add(start, max_tokens=2 * BLOCK_TOKENS)
    if running:
        world.step()
        change = world.requests[first].num_computed_tokens
        assert 0 < change < BLOCK_TOKENS
        call_workers("update_weights")
    world.run()
    if not running:
        call_workers("update_weights")
    text = start + world.outputs[first] + random_prompt(random.Random(3), HIT)
    stored = world.cache.counters.stored_blocks
    world.generate(text)  # behind what vLLM has
    world.settle()
    assert world.cache.counters.stored_blocks == stored
    # Once vLLM has reset its cache, all is as ever.
    assert hits(world, text) == 0
    assert hits(world, text) == len(text) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.skipif(not binds_pool(), reason="vLLM shows its prefix cache from 0.22 on")
def test_an_engine_that_was_reset_first_goes_on_storing(
    make_world: MakeWorld, prompt: list[int]
) -> None:
    """As when an engine sleeps, and loads weights as it wakes: vLLM has no old blocks."""
    world = make_world()
    world.generate(prompt)
    world.forget()
    change_weights(world)
    world.generate(prompt)
    text = prompt + random_prompt(random.Random(4), HIT)
    world.generate(text)  # behind what vLLM has
    assert hits(world, text) == len(text) // BLOCK_TOKENS * BLOCK_TOKENS
    world.check_outputs()


def test_under_offloading_connector(
    make_offloading_world: MakeOffloadingWorld, prompt: list[int]
) -> None:
    world = make_offloading_world()
    world.generate(prompt)
    assert hits(world, prompt) == HIT
    change_weights(world)
    assert hits(world, prompt) == 0
    assert hits(world, prompt) == HIT
    world.check_outputs()
