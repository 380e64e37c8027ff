# SPDX-License-Identifier: Apache-2.0
"""Makes pools in a thread: to fill hundreds of GiB takes seconds to minutes, and the service's loop
serves all others meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from flexkv.service.lobby import Newcomer
from flexkv.service.messages import PoolBlocks
from flexkv.service.pool import SharedPool


class Made(NamedTuple):
    """What has come of a pool.

    Attributes:
        blocks: the blocks of its engines.
        newcomer: who needs it.
        result: the pool, the caller's; or why there is none.
    """

    blocks: PoolBlocks
    newcomer: Newcomer
    result: SharedPool | Exception


class PoolMaker:
    """Makes one pool after the other. All methods are the loop's.

    Args:
        wake: lets the loop begin a turn. Called in the thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, "flexkv-pools")
        self._making: dict[PoolBlocks, tuple[Newcomer, Future[SharedPool]]] = {}

    def is_making(self, blocks: PoolBlocks) -> bool:
        """Whether a pool is being made, or waits to be, or has not been drained."""
        return blocks in self._making

    def begin(self, blocks: PoolBlocks, newcomer: Newcomer, make: Callable[[], SharedPool]) -> None:
        """Make a pool for a newcomer by calling `make` in the thread."""
        # In one statement: no error loses a pool that is being made.
        self._making[blocks] = newcomer, (future := self._thread.submit(make))
        future.add_done_callback(lambda _: self._wake())

    def drain(self) -> Iterator[Made]:
        """What has come of pools since the last call. What is not taken comes again."""
        for blocks, (newcomer, future) in list(self._making.items()):
            if future.done():
                error = future.exception()
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield Made(blocks, newcomer, error or future.result())
                del self._making[blocks]

    def close(self) -> None:
        """Make no more. A pool that is being made is closed once it is there."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        for _, future in self._making.values():
            future.add_done_callback(_close)
        self._making.clear()


def _close(future: Future[SharedPool]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close(0.0)
