# SPDX-License-Identifier: Apache-2.0
"""SGLang's page hash, which it builds when it is first called, is loaded at start or refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LINKER = """
from types import SimpleNamespace
from flexkv_sglang.linker import FlexKVLinker
group = dict(attn_tp_cache_group=None, tp_cache_group=None, pp_cache_group=None)
FlexKVLinker(None, SimpleNamespace(**group), components=set())
"""
BACKEND = """
from types import SimpleNamespace
from flexkv_sglang.hicache.storage import FlexKVStorage
FlexKVStorage(SimpleNamespace(extra_config={'interface_v1': 1}, tp_rank=0, pp_rank=0), {})
"""


@pytest.mark.parametrize("start", [LINKER, BACKEND], ids=["linker", "hicache"])
def test_a_server_without_a_compiler_is_refused_with_the_cause(tmp_path: Path, start: str) -> None:
    nowhere = str(tmp_path / "no-compiler")
    env = {
        **os.environ,
        "CXX": nowhere,
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", start], env=env, capture_output=True, text=True, check=False
    )
    last = [line for line in done.stderr.splitlines() if "ConfigError" in line]
    assert last, done.stderr[-3000:]
    assert "SGLang's page hash (hicache_hash_cpp)" in last[-1]
    assert "TORCH_EXTENSIONS_DIR" in done.stderr
    assert nowhere in done.stderr


def test_the_page_hash_of_this_machine_is_loaded() -> None:
    from sglang.srt.mem_cache.cpp_utils.native_hash import _load_native_hash_module

    from flexkv_sglang.support import load_page_hash

    _load_native_hash_module.cache_clear()
    load_page_hash()
    assert _load_native_hash_module.cache_info().currsize == 1
