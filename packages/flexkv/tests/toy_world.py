# SPDX-License-Identifier: Apache-2.0
"""A toy engine with its disk, its faults and the end of each test."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from toy_engine import BLOCK, Shape, ToyEngine, ToyRequest

from flexkv import CacheConfig
from flexkv.engine.choice.chooser import LoadMode
from flexkv.engine.start import operator_access
from flexkv.operators.verbs import PromptQuestion
from flexkv_kernels import HostMemory
from packages.inside import assert_no_fetch, assert_no_lease, index_of
from packages.late_mover import LateMover
from packages.tier_blocks import assert_no_slot_is_lost

SLOT_GB = 4096 / (1 << 30)
_PATIENCE_STEPS = 20_000
"""A disk answers within far fewer steps."""


class LateMemory(HostMemory):
    """Host memory whose copies begin late, and some of which fail.

    Args:
        rng: decides when, and which fail.
        polls: see `LateMover`.
        failure_rate: see `LateMover`.
    """

    def __init__(
        self, rng: random.Random, polls: tuple[int, int] = (0, 5), failure_rate: float = 0.0
    ) -> None:
        self._options = rng, polls, failure_rate
        self.movers: list[LateMover] = []

    def make_mover(self, *args: Any) -> LateMover:
        """See `Device.make_mover`."""
        mover = LateMover(super().make_mover(*args), *self._options)
        self.movers.append(mover)
        return mover


class ToyKeys:
    """The keys of toy prompts, two at a time."""

    block_tokens = BLOCK

    def count(self, question: PromptQuestion) -> int:
        return len(question.tokens) // BLOCK or len(question.hashes)

    def parts(self, question: PromptQuestion) -> Iterator[Sequence[bytes]]:
        request = ToyRequest("q", [*question.tokens], 1, cache_salt=question.cache_salt)
        keys = request.block_hashes or [bytes.fromhex(each) for each in question.hashes]
        for start in range(0, len(keys), 2):
            yield keys[start : start + 2]

    def others(self, question: PromptQuestion, blocks: int | None = None) -> Iterator[list[bytes]]:
        return iter(())


class ToyWorld:
    """Makes a toy engine, and another one after it: `restart`.

    Args:
        root: folder of sessions and disk.
        slots: blocks of host memory.
        disk_slots: blocks of the disk; 0 for no disk.
        blocks: FlexKV's blocks that the engine's pages have room for.
        settings: further settings of FlexKV.
    """

    def __init__(
        self,
        root: Path,
        *,
        slots: int = 64,
        disk_slots: int = 0,
        blocks: int = 32,
        mode: LoadMode = LoadMode.ASYNC,
        device: HostMemory | None = None,
        shape: Shape | None = None,
        **settings: Any,
    ) -> None:
        if disk_slots:
            settings["ssd_cache_gb"] = (disk_slots * (4096 + 64) + 40960) / (1 << 30)
            settings["ssd_cache_dir"] = (str(root / "disk"),)
        self.config = CacheConfig(
            cpu_cache_gb=slots * SLOT_GB,
            runtime_dir=str(root / "run"),
            always_load=True,
            **settings,
        )
        shape = shape or Shape()
        pages = 1 + (blocks - 1) * BLOCK // shape.page
        access = operator_access(self.config, ToyKeys())
        self._options = access, device or HostMemory(), pages, mode, shape
        self.engine = ToyEngine(self.config, *self._options)

    def run(self) -> None:
        """Step until all requests have ended."""
        engine = self.engine
        for _ in range(_PATIENCE_STEPS):
            if not (engine.waiting or engine.running or engine.loading):
                return
            engine.step()
            time.sleep(0)  # lets the disk's threads run
        raise AssertionError("a request never ends")

    def settle(self) -> None:
        """Step until no copy and no disk operation is under way."""
        self.run()
        for _ in range(_PATIENCE_STEPS):
            if not self.engine.cache.busy:
                return
            self.engine.step()
            time.sleep(0)
        raise AssertionError("a copy never ends")

    def generate(self, prompt: Sequence[int], **options: Any) -> ToyRequest:
        request = self.engine.add(prompt, **options)
        self.run()
        return request

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        self.settle()
        self.engine.pool.found = {}

    def hits(self, prompt: Sequence[int], **options: Any) -> int:
        """Blocks of a prompt that FlexKV loads for a new request."""
        self.forget()
        request = self.generate(prompt, **options)
        return request.loaded // BLOCK

    def restart(self) -> None:
        """Another process of the engine."""
        self.close()
        self.engine = ToyEngine(self.config, *self._options)

    def close(self) -> None:
        """End all requests, and see that nothing is left of them."""
        engine = self.engine
        for request in list(engine.requests.values()):
            if not request.has_ended:
                engine.end(request)
        self.run()
        assert len(engine.pool.free) == engine.pages.tensors.shape[1] - 1
        if not engine.side.is_off:
            self.settle()
            assert_no_lease(engine.cache)
            assert_no_slot_is_lost(index_of(engine.cache))
            if engine.cache.info.media:
                assert_no_fetch(engine.cache)
        for worker in reversed(engine.workers):
            worker.close()
        engine.side.close(flush_seconds=60.0)
