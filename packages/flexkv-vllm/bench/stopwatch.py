# SPDX-License-Identifier: Apache-2.0
"""Times the calls of vLLM's scheduler to our connector, over the tests' world.

The world's workers run on the scheduler's thread, other than those of a real engine with several
GPUs. `leave_out_workers` makes them do nothing, so that neither their work nor what they do to the
processor's caches counts.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from engine_world import World

from flexkv.types.mover import Status

CALLS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "on_new_request",
    "get_kv_connector_stats",
    "get_external_cache_hit_sources",
    "take_events",
    "has_pending_block_frees",
    "has_pending_push_work",
)
"""What vLLM's scheduler calls in steps. `update_connector_output` sees what has ended of copies."""


class Stopwatch:
    """Microseconds of this thread's CPU time in each of the connector's calls, in order."""

    def __init__(self, connector: Any) -> None:
        self.taken: dict[str, list[float]] = {}
        for name in CALLS:
            if hasattr(connector, name):
                setattr(connector, name, self._timed(name, getattr(connector, name)))

    def total(self, *names: str) -> float:
        """Of these calls since `clear`; of all if none is named."""
        return sum(sum(self.taken.get(name, ())) for name in names or self.taken)

    def clear(self) -> None:
        self.taken.clear()

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.thread_time()
            result = call(*args)
            taken = time.thread_time() - start
            self.taken.setdefault(name, []).append(taken * 1e6)
            return result

        return timed


class InstantMover:
    """Says that every copy is done as it begins."""

    def __init__(self) -> None:
        self._tickets = 0

    def submit(
        self,
        direction: Any,
        engine_blocks: Any,
        offsets: Any,
        after: int = 0,
        flag_address: int = 0,
        *,
        planes: Any = None,
        mark: int = 0,
    ) -> int:
        if flag_address:
            ctypes.c_uint32.from_address(flag_address).value = Status.DONE
        self._tickets += 1
        return self._tickets

    def poll(self, ticket: int) -> Status:
        return Status.DONE

    def wait(self, ticket: int, seconds: float) -> Status:
        return Status.DONE

    def copy_seconds(self, ticket: int) -> float | None:
        return None

    def bytes_by_way(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


def leave_out_workers(world: World) -> None:
    """Nothing is computed, and copies end at once."""
    for rank in world.ranks:
        side: Any = rank.side  # type: ignore[attr-defined]
        side._copies.mover.close()
        side._copies.mover = InstantMover()
        type(rank).forward = no_forward  # type: ignore[method-assign]


def no_forward(*args: Any) -> None:
    """Nothing is computed."""
