# SPDX-License-Identifier: Apache-2.0
"""HiCache's file backend and host pool by their classes, in SGLang's Python, which runs this file:
`python -m integration.peers.hicache_files FOLDER` prints a line of JSON for each finding."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from integration.peers.files import file_findings
from integration.peers.page import HICACHE, Finding

PAGE, PAGES, MOST = 64 << 10, 16, 4


def hicache_findings(folder: Path) -> Iterator[Finding]:
    """Each row of HiCache that runs without a GPU."""
    import torch

    pages = {
        f"page{number}": torch.frombuffer(bytearray(os.urandom(PAGE)), dtype=torch.uint8)
        for number in range(PAGES)
    }

    def write() -> bytes:
        _store(folder).batch_set(list(pages), list(pages.values()))
        return b"".join(page.numpy().tobytes() for page in pages.values())

    def read() -> bytes:
        target, store = torch.zeros(PAGE, dtype=torch.uint8), _store(folder)
        return b"".join(store.get(key, target).numpy().tobytes() for key in pages)

    yield from file_findings(HICACHE, folder, "0666", write, read)
    kept = len(list(folder.glob("*.bin")))
    bounded = folder / "bounded"
    _store(bounded, max_size=str(MOST * PAGE)).batch_set(list(pages), list(pages.values()))
    left = len(list(bounded.glob("*.bin")))
    seen = f"{kept} of {PAGES} pages kept by default, {left} with a max_size of {MOST}"
    holds = kept == PAGES and 0 < left <= MOST
    yield Finding(HICACHE, "bound on disk space", seen, holds)

    error = _error_of_host_pool()
    seen = f"a host pool: {error or 'made'}"
    yield Finding(HICACHE, "KV cache in the memory of CPUs", seen, holds=error is not None)


def _store(folder: Path, **extra: str) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True,
        model_name="model", extra_config={"file_storage_path": str(folder), **extra},
    )  # fmt: skip
    return HiCacheFile(config)


def _error_of_host_pool() -> str | None:
    """Of one for a KV cache in the memory of a CPU; None if SGLang makes it."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = MHATokenToKVPool(64, 4, torch.float16, 2, 8, 3, "cpu", False)
    source = device.get_device_pool_infos()[0].buffer_info
    sizes = {"device_capacity_tokens": 64, "start_layer": 0, "end_layer": 3}
    try:
        MHATokenToKVPoolHost(source, 2.0, 0, 4, "page_first_direct", **sizes)
    except Exception as error:  # noqa: BLE001  (whichever SGLang raises is the answer)
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    # SGLang as it is packaged, without what our tests add.
    vars(importlib.import_module("sglang_on_cpu"))["_AFTER"].clear()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang prints, too
    for finding in hicache_findings(Path(sys.argv[1])):
        print(json.dumps(dataclasses.asdict(finding)), file=output, flush=True)
