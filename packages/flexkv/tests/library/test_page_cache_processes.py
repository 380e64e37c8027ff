# SPDX-License-Identifier: Apache-2.0
"""Caches of programs that end or fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAD = """
import os, sys, numpy as np, flexkv
pages = np.ones((4, 4096), np.uint8)
layout = flexkv.KVLayout.from_tensors([flexkv.TensorView.of("kv", pages)], 4)
settings = {"cpu_cache_gb": 1e-4, "ssd_cache_gb": 1e-3, "ssd_cache_dir": sys.argv[1]}
settings["ssd_timeout_seconds"] = flexkv.tiers.device.CLOSE_SECONDS = 60.0
cache = flexkv.open_cache(settings, layout, identity="m")
"""


def run(script: str, folder: Path) -> str:
    command = [sys.executable, "-W", "error", "-c", HEAD + script, str(folder)]
    return subprocess.check_output(command, text=True, stderr=subprocess.STDOUT, timeout=120)


def test_a_program_that_ends_without_closing_keeps_its_blocks(tmp_path: Path) -> None:
    assert run("print(cache.store([b'a', b'b'], [0, 1]))", tmp_path) == "2\n"
    assert run("print(cache.lookup([b'a', b'b', b'c']))", tmp_path) == "2\n"


def test_a_forked_child_has_no_cache_and_harms_none(tmp_path: Path) -> None:
    script = """
cache.store([b'a'], [0])
copy = cache.begin_load([b'a'], [1])
child = os.fork()
if child == 0:
    for call in (lambda: cache.lookup([b'a']), lambda: cache.flush(), lambda: copy.wait()):
        try:
            call()
        except flexkv.FlexKVError as error:
            print(error, flush=True)
    cache.close()
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
print(copy.wait(), cache.load([b'a'], [2]), cache.lookup([b'a']))
cache.close()
"""
    *said, last = run(script, tmp_path).splitlines()
    assert [line.partition(";")[0] for line in said] == [
        "the cache is that of the process that this one was forked from"
    ] * 3
    assert last == "1 1 1"
