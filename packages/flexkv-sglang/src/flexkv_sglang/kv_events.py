# SPDX-License-Identifier: Apache-2.0
"""FlexKV's tiers among SGLang's KV events (`--kv-events-config`), in SGLang's own words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from flexkv.types.changes import Medium
from flexkv_sglang.tier_events import Page, TierEvents, Told


def follow(events: list[Any], ours: TierEvents, page_size: int) -> list[Any]:
    """SGLang's events, with those that were learned early, followed by FlexKV's.

    A disk's pages are found before the server takes requests, and SGLang publishes while it is
    idle. Who subscribes when the server is ready would miss them, so that they wait until SGLang
    itself has told of a page.

    Args:
        events: SGLang's events, in order; unchanged.
        ours: learns the pages' tokens from them.
        page_size: tokens of a page.
    """
    early, ours.early = ours.early, []
    _learn(events, ours)
    told = ours.take() if ours.begun else []
    published = [*early, *events, *_to_sglang(told, page_size)]
    ours.confirm(told)
    return published


def learn_early(events: list[Any], ours: TierEvents) -> None:
    """Learn from events of SGLang that `follow` is to publish.

    Args:
        events: in order.
        ours: keeps them until then.
    """
    ours.early += events
    _learn(events, ours)


def _learn(events: list[Any], ours: TierEvents) -> None:
    from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

    for event in events:
        if isinstance(event, BlockStored):
            ours.begun = True
            ours.learn(_pages_of(event), (), cleared=False)
        elif isinstance(event, BlockRemoved):
            ours.learn((), event.block_hashes, cleared=False)
        elif isinstance(event, AllBlocksCleared):
            ours.learn((), (), cleared=True)


def _pages_of(event: Any) -> Iterator[Page]:
    """The pages of an event. Pages of a tenant or an adapter are left out: SGLang's events have
    other hashes for them than its storage, and no tier can find a page by those."""
    if event.cache_salt is not None or event.lora_name is not None:
        return
    parent, size = event.parent_block_hash, event.block_size
    for i, number in enumerate(event.block_hashes):
        yield Page(number, parent, event.token_ids[i * size : (i + 1) * size])
        parent = number


def _to_sglang(told: Iterable[Told], page_size: int) -> list[Any]:
    """FlexKV's events as SGLang's, adjacent pages joined as SGLang joins its own."""
    from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, StorageMedium
    from sglang.srt.mem_cache.events import KVCacheEventRecorder

    # Shared stores report no changes.
    media = {Medium.HOST: StorageMedium.CPU, Medium.DISK: StorageMedium.DISK}
    recorder = KVCacheEventRecorder(enabled=True, page_size=page_size)
    for each in told:
        page, medium = each.page, media[each.medium]
        if not each.stored:
            recorder.enqueue(BlockRemoved(block_hashes=[page.number], medium=medium))
            continue
        recorder.enqueue(
            BlockStored(
                block_hashes=[page.number],
                parent_block_hash=page.parent,
                token_ids=list(page.tokens),
                block_size=len(page.tokens),
                lora_id=None,
                medium=medium,
            )
        )
    events: list[Any] = recorder.take()
    return events
