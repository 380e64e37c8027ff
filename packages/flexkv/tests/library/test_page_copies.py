# SPDX-License-Identifier: Apache-2.0
"""Copies of a cache without an engine, and what follows from their ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, time
import numpy as np
from flexkv import KVLayout, TensorView, open_cache

PAGES, KEYS = 64, [b"block %d" % i for i in range(64)]
tensor = np.ones((PAGES, 4096), np.uint8)
layout = KVLayout.from_tensors([TensorView.of("layer", tensor)], PAGES)
settings = {
    "cpu_cache_gb": 4 * PAGES * 4096 / (1 << 30),
    "ssd_cache_gb": 1 / 64,
    "ssd_cache_dir": sys.argv[1],
    "ssd_timeout_seconds": 60.0,
}

cache = open_cache(settings, layout, identity="numbers")
if sys.argv[2] == "load":
    print(cache.lookup(KEYS), flush=True)
    os._exit(0)
if sys.argv[2] == "store":
    cache.store(KEYS, range(PAGES))
else:
    first, second = (cache.begin_store(KEYS[:n], range(n)) for n in (40, 64))
    while not (first.done and second.done):
        pass
drive = cache.cache._below.tiers[0].drives[0]
deadline = time.monotonic() + 60
while drive.link._running or drive.link._queue:
    assert time.monotonic() < deadline
    time.sleep(0.001)
print("at rest", flush=True)
os.kill(os.getpid(), 9)
"""


def run(root: Path, what: str) -> str:
    command = [sys.executable, "-c", PROGRAM, str(root), what]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("how", ["store", "begin"])
def test_stored_blocks_reach_the_disk_without_another_call(tmp_path: Path, how: str) -> None:
    """The program is killed before it calls again."""
    assert run(tmp_path, how) == "at rest"
    assert run(tmp_path, "load") == "64"
