# SPDX-License-Identifier: Apache-2.0
"""vLLM's OffloadingConnector with FlexKV's spec beside a connector that loads in the step that
computes the rest of a request, and whose loads fail."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_world import random_prompt
from kv_pages import BLOCK_TOKENS
from offloading_world import MakeOffloadingWorld, OffloadingWorld

from packages.inside import copies_of
from packages.inside_adapters import held_stores

PROMISED = 6
TOKENS = 130


class OtherConnector:
    """Stands before FlexKV's, promises the first blocks of a prompt, and loads none of them."""

    def __init__(self, world: OffloadingWorld, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failed: set[int] = set()
        connector, worker = world.connector, world.ranks[0].connector
        match, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

        def promise(request: Any, local_tokens: int) -> tuple[int, bool]:
            match(request, local_tokens)
            return max(0, PROMISED * BLOCK_TOKENS - local_tokens), False

        def take_blocks(request: Any, blocks: Any, tokens: int) -> None:
            allocated(request, blocks, 0)
            if tokens:
                self.failed.update(blocks.get_block_ids()[0][:PROMISED])

        def report() -> set[int]:
            failed, self.failed = self.failed, set()
            return failed

        monkeypatch.setattr(connector, "get_num_new_matched_tokens", promise)
        monkeypatch.setattr(connector, "update_state_after_alloc", take_blocks)
        monkeypatch.setattr(worker, "get_block_ids_with_load_errors", report)


@pytest.mark.parametrize(
    ("ends", "hidden"),
    [
        ("recomputed", False),
        ("aborted", False),
        ("failed", False),
        ("recomputed", True),
        ("failed", True),
    ],
)
def test_what_another_connector_failed_to_load_is_not_cached(
    make_offloading_world: MakeOffloadingWorld,
    monkeypatch: pytest.MonkeyPatch,
    ends: str,
    *,
    hidden: bool,
) -> None:
    """With `hidden`, in a release of vLLM that has the requests' blocks elsewhere."""
    if hidden:
        monkeypatch.setattr("flexkv_vllm.offloading.held.blocks_of_requests", lambda _: None)
    policy = "fail" if ends == "failed" else "recompute"
    world = make_offloading_world(policy=policy, budget=256)
    # Their jobs find vLLM's connector by the first one.
    world.generate(random_prompt(random.Random(1), 20))
    prompt = random_prompt(random.Random(2), TOKENS)
    with monkeypatch.context() as patch:
        other = OtherConnector(world, patch)
        request_id = world.add(prompt)
        world.step()
        assert other.failed == set()
        if ends == "aborted":
            world.abort(request_id)
        world.run()
    for _ in range(2):  # with vLLM's own hit, then with FlexKV's
        again = world.generate(prompt, max_tokens=1)
        world.check_outputs()
        world.forget()
    again = world.generate(prompt, max_tokens=1)
    assert world.external_tokens[again] == TOKENS // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_store_counts_only_when_vllm_reports_its_end(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    world = make_offloading_world(budget=256)
    request_id = world.add(random_prompt(random.Random(3), TOKENS), max_tokens=3)
    world.step()
    (held,) = held_stores(world.manager)
    assert held.request_id == request_id
    (copy,) = copies_of(world.cache)
    assert (copy.transfer.id, copy.held) == (held.transfer_id, True)
    world.run()
    world.settle()
    assert len(world.manager.held) == 0
    assert world.cache.ready_blocks == TOKENS // BLOCK_TOKENS


def test_a_reset_holds_no_store(make_offloading_world: MakeOffloadingWorld) -> None:
    world = make_offloading_world(budget=256)
    world.add(random_prompt(random.Random(4), TOKENS), max_tokens=3)
    world.step()
    world.manager.reset_cache()
    assert len(world.manager.held) == 0
    world.run()
    world.settle()
    assert world.cache.ready_blocks == 0
