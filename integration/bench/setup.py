# SPDX-License-Identifier: Apache-2.0
"""The engines of the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration.harness import connector
from integration.harness.checkpoint import BENCH, TINY, write_checkpoint
from integration.harness.config import EngineConfig
from integration.harness.connector import Connector
from integration.harness.engine import Engine
from integration.harness.prompts import random_tokens

# No multiples of a block: vLLM never serves a prompt's last block from its own cache if the prompt
# ends with it, and FlexKV would load that block for what is called vLLM's own hit.
LENGTHS = (4090, 8190, 21000)
# Steps of at most this many tokens, as the longest prompt that vLLM's ExampleConnector can take
# must fit into one step.
BATCHED_TOKENS = 4096
# Holds one prompt of each length several times over: 4 KiB a token.
KV_CACHE_BYTES = 1 << 30
ARENA_GB = 1.0
# oneDNN, which vLLM's CPU build computes with, keeps compiled code for so many shapes of
# matrices, by default 1,024. Steps of mixed requests have more shapes than that, so a plain vLLM
# grows by 400 MiB during 10,000 requests, with or without FlexKV; with so few it is full early.
SHAPES_CACHED = 32
# Bytes from which glibc gives freed memory back at once: fixed, it does not raise it to 32 MiB by
# itself. Otherwise the holes between tensors of changing sizes look like a leak of some percent.
MMAP_THRESHOLD = 65536


@dataclass(slots=True)
class Bench:
    """Where things are, and how often everything is measured.

    ``folder`` holds checkpoints, logs and FlexKV's runtime files; ``samples`` are measurements per
    engine start, ``pairs`` the starts with and without FlexKV. ``disk_dir`` is on the disk that is
    measured; None for the system's directory for temporary files. ``traces`` are files of requests
    that eviction policies are compared on.
    """

    folder: Path
    samples: int = 5
    pairs: int = 3
    disk_dir: Path | None = None
    traces: tuple[Path, ...] = ()
    _prompts: int = 0

    def flexkv(self, arena_gb: float = ARENA_GB, **settings: Any) -> Connector:
        """FlexKV with its defaults but for the size of the arena, and ``settings``."""
        runtime_dir = str(self.folder / "run")
        return connector.plugin(cpu_cache_gb=arena_gb, runtime_dir=runtime_dir, **settings)

    def example(self) -> Connector:
        """vLLM's ExampleConnector with an empty store."""
        return connector.example(self.folder / "example")

    def engine(
        self, chosen: Connector, async_scheduling: bool | None = None, *, forked: bool = False
    ) -> Engine:
        """The bench model, in bfloat16, behind ``chosen``. For ``forked``, see ``EngineConfig``."""
        config = EngineConfig(
            model=write_checkpoint(BENCH, self.folder),
            dtype=BENCH.dtype,
            connector=chosen,
            max_model_len=24576,
            max_num_batched_tokens=BATCHED_TOKENS,
            kv_cache_bytes=KV_CACHE_BYTES,
            async_scheduling=async_scheduling,
            forked=forked,
        )
        return self._start(config)

    def small_engine(self, chosen: Connector) -> Engine:
        """The tests' model with a small KV cache, for many requests in a short time."""
        config = EngineConfig(
            model=write_checkpoint(TINY, self.folder),
            dtype=TINY.dtype,
            connector=chosen,
            block_size=32,
            max_model_len=1024,
            kv_cache_bytes=32 << 20,
            env={
                "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(SHAPES_CACHED),
                "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD),
            },
        )
        return self._start(config)

    def _start(self, config: EngineConfig) -> Engine:
        number = len(list((self.folder / "logs").glob("*.log"))) + 1
        return Engine(config, self.folder / "logs" / f"{number:02d}-{config.connector.name}.log")

    def fresh_prompt(self, length: int) -> list[int]:
        """A prompt that no engine of this run has seen."""
        self._prompts += 1
        return random_tokens(f"bench {self._prompts}", length, BENCH.vocab)
