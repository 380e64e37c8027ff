# SPDX-License-Identifier: Apache-2.0
"""A subscriber to KV events, and what it should have been told."""

from __future__ import annotations

from itertools import chain
from typing import Any, TypeAlias

from engine_world import World
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from flexkv.engine.scheduler.options import RequestOptions
from flexkv.engine.scheduler.request import TrackedRequest
from flexkv_vllm.compat.events import MEDIA, event_hash
from packages.inside_adapters import groups_of, keys_of_side

HOST, DISK = "CPU", "STORAGE"

Blocks: TypeAlias = dict[str, set[tuple[int, Any]]]
"""By medium: KV cache group and hash of vLLM's blocks."""


class Subscriber:
    """Keeps what it was told can be loaded, for each medium of FlexKV's. As in the indexes of
    routers, `AllBlocksCleared` clears all media."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.told: Blocks = {HOST: set(), DISK: set()}
        self.cleared: Blocks = {HOST: set(), DISK: set()}
        self.stored: list[BlockStored] = []

    def listen(self) -> None:
        """Take the events since the last call."""
        events, self.world.recorder.events = self.world.recorder.events, []
        for event in events:
            if isinstance(event, AllBlocksCleared):
                for medium, told in self.told.items():
                    self.cleared[medium] |= told
                    told.clear()
            if getattr(event, "medium", None) not in self.told:
                continue  # vLLM's own
            told = self.told[event.medium]
            blocks = {(event.group_idx, name) for name in event.block_hashes}
            assert blocks
            assert len(blocks) == len(event.block_hashes)
            if isinstance(event, BlockStored):
                assert not told & blocks, "told twice"
                told |= blocks
                self.cleared[event.medium] -= blocks
                self.stored.append(event)
            else:
                assert isinstance(event, BlockRemoved)
                assert told | self.cleared[event.medium] >= blocks, "never told"
                self.cleared[event.medium] -= blocks
                told -= blocks


def drain(subscriber: Subscriber) -> None:
    """Let an idle engine tell what has happened since its last step."""
    subscriber.world.settle()
    subscriber.world.step()
    subscriber.listen()


def loadable(world: World, *others: World) -> Blocks:
    """The last of vLLM's hashes of every FlexKV block that a request of any of these worlds can
    have had and lookups of the first one find."""
    found: Blocks = {HOST: set(), DISK: set()}
    side = world.side
    for request in chain(*(each.requests.values() for each in (world, *others))):
        tracked = TrackedRequest(request, RequestOptions())
        names = [event_hash(each) for each in request.block_hashes]
        for group in groups_of(side):
            keys, step = keys_of_side(side).of(tracked, group), group.engine_blocks
            for medium, there in world.cache.where(keys).items():
                found[MEDIA[medium]] |= {
                    (group.index, names[(position + 1) * step - 1])
                    for position, is_there in enumerate(there)
                    if is_there
                }
    return found
