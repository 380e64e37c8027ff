# SPDX-License-Identifier: Apache-2.0
"""vLLM's file tier by its classes, and vLLM's own connectors in an engine on a CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from integration.bench.disk_contenders import VllmFiles, random_memory
from integration.harness import connector
from integration.harness.answers import EngineStartError
from integration.harness.checkpoint import TINY, write_checkpoint
from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.peers.files import file_findings
from integration.peers.page import VLLM, Finding

BLOCK, BLOCKS, ROUNDS = 64 << 10, 8, 8


def vllm_findings(folder: Path) -> Iterator[Finding]:
    """Each row of vLLM that runs without a GPU."""
    yield from _files(folder / "fs")
    model = write_checkpoint(TINY, folder)
    for kind in (connector.native_offloading(0.1), connector.simple_offloading(0.1)):
        config = EngineConfig(model, TINY.dtype, kind, kv_cache_bytes=64 << 20, forked=True)
        try:
            with Engine(config, folder / f"{kind.name}.log"):
                seen, refused = "starts", False
        except EngineStartError as error:
            cause = re.search(r"Worker failed with error '(.*)', please", error.log)
            seen, refused = cause[1] if cause else str(error), cause is not None
        row = "KV cache in the memory of CPUs"
        yield Finding(VLLM, row, f"{kind.name}: {seen}", holds=refused)


def _files(folder: Path) -> Iterator[Finding]:
    memory, other = random_memory(BLOCK * BLOCKS), random_memory(BLOCK * BLOCKS)
    tier, second = VllmFiles(folder, memory, BLOCK), VllmFiles(folder, other, BLOCK)

    def write() -> bytes:
        tier.write()
        return bytes(memory)

    def read() -> bytes:
        second.keys = tier.keys
        second.read()
        return bytes(other)

    yield from file_findings(VLLM, folder, "0644", write, read)
    for _ in range(ROUNDS):
        tier.write()
    kept = len(list(folder.rglob("*.bin")))
    seen = f"{kept} blocks kept below {BLOCKS} of host memory"
    yield Finding(VLLM, "bound on disk space", seen, holds=kept >= ROUNDS * BLOCKS)
    tier.close()
    second.close()
