# SPDX-License-Identifier: Apache-2.0
"""Loads and stores that SGLang has ordered and that are under way."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from flexkv import KVCache
from flexkv.adapter.orders import CopyOrder
from flexkv.transfer.copies import Transfer


@dataclass(slots=True)
class QueuedLoad:
    """A load that begins with the next batch.

    Attributes:
        order: the copy, the same on all ranks.
        transfer: the load with its leases; None on all ranks but the first, which decides.
        fetched: how many of its pages lower tiers gave; 0 on all ranks but the first.
    """

    order: CopyOrder
    transfer: Transfer | None
    fetched: int = 0


@dataclass(slots=True)
class Offload:
    """A store that SGLang has ordered. SGLang asks for the ends of stores in its calls' order.

    Attributes:
        transfer: the store under way; None if nothing is copied, and on all ranks but the first.
        stored: whether the cache has all pages of the store, once `transfer` ends without failure.
    """

    transfer: Transfer | None
    stored: bool


def reserve(
    cache: KVCache, chain: Sequence[bytes], count: int
) -> tuple[Transfer | None, list[int]]:
    """Begin the store of the last `count` blocks of a chain. If host memory has the block before
    them, it keeps that block at least as long as them. After an error, nothing is under way.

    Args:
        cache: of the engine.
        chain: keys of the blocks, with the key of the block before them if it is known.
        count: number of the blocks to store; `chain` has as many keys, or one more.

    Returns:
        The store, None if no block got a slot; and for each block its slot, or -1.
    """
    first = len(chain) - count
    keys = chain[first:]
    if first and not cache.missing(chain[:1]):
        transfer = cache.store(chain, range(1, len(chain)), begins=())
    else:
        transfer = cache.store(keys, range(len(keys)))
    if transfer is None:
        return None, [-1] * count
    with contextlib.ExitStack() as undo:
        undo.callback(cache.cancel, transfer)
        slots = _slots_of(transfer, keys)
        undo.pop_all()
    return transfer, slots


def _slots_of(transfer: Transfer, keys: Sequence[bytes]) -> list[int]:
    given = {block.key: block.slot for block in transfer.blocks}
    return [given.get(key, -1) for key in keys]
