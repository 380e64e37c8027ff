# SPDX-License-Identifier: Apache-2.0
"""Operators ask real engines by the command: which tiers have a prompt, warm, pin and remove it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from integration.harness.checkpoint import TINY
from integration.harness.prompts import random_tokens
from integration.sglang.linker import PAGE_TOKENS, linker_config
from integration.sglang.server import SglangServer
from integration.tests import corpus
from integration.tests.disks import run_cli

PROMPT = random_tokens("operators", 8 * corpus.FLEXKV_BLOCK + 5, TINY.vocab)
ANSWER = 4
PATIENCE = 300.0


class Operator:
    """Runs the command on the only engine of a runtime directory."""

    def __init__(self, folder: Path) -> None:
        self.root = str(folder / "run")
        self._prompt = str(folder / "prompt.json")
        Path(self._prompt).write_text(json.dumps(PROMPT))

    def on_prompt(self, command: str) -> str:
        """Warm or pin the prompt. Returns what is printed."""
        return _print_of(command, self._prompt, self.root)

    def remove(self) -> str:
        return _print_of("clear", "prompt", self._prompt, self.root, "--yes")

    def remove_session(self, name: str) -> str:
        return _print_of("clear", "session", name, self.root, "--yes")

    def clear(self) -> str:
        return _print_of("clear", "engines", "all", self.root, "--yes")

    def tiers(self) -> list[int]:
        """Blocks of the prompt in each tier."""
        _, (places,) = run_cli("lookup", self._prompt, self.root, "--json")
        return [each["blocks"] for each in places["tiers"]]

    def await_tiers(self, blocks: list[int]) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.tiers() != blocks:
            assert time.monotonic() < deadline, self.tiers()
            time.sleep(0.2)


def _print_of(*arguments: str) -> str:
    words = [sys.executable, "-m", "flexkv", *arguments]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def disk(folder: Path) -> dict[str, Any]:
    return {"ssd_cache_gb": 0.1, "ssd_cache_dir": str(folder / "disk")}


def test_sglang(tmp_path: Path, model: Path, sglang: Path) -> None:
    operator = Operator(tmp_path)
    own = {"cpu_cache_gb": 0.1, "runtime_dir": operator.root, "always_load": "1"} | disk(tmp_path)
    settings = {f"FLEXKV_{name.upper()}": str(value) for name, value in own.items()}
    blocks = len(PROMPT) // PAGE_TOKENS
    config = linker_config(model, TINY, settings, forked=True)
    with SglangServer(config, tmp_path / "first.log") as server:
        answer = server.generate(PROMPT, ANSWER)
        operator.await_tiers([blocks, blocks])
    with SglangServer(config, tmp_path / "second.log") as server:
        assert operator.tiers() == [0, blocks]
        assert f": host memory has {blocks} " in operator.on_prompt("warm")
        assert operator.tiers() == [blocks, blocks]
        assert f": pinned {blocks} " in operator.on_prompt("pin")
        again = server.generate(PROMPT, ANSWER)
        assert again.tokens == answer.tokens
        assert again.cached_tokens == blocks * PAGE_TOKENS
        server.flush()
        assert f": removed {blocks} " in operator.remove()
        assert operator.tiers() == [0, 0]
        once_more = server.generate(PROMPT, ANSWER)
        assert (once_more.tokens, once_more.cached_tokens) == (answer.tokens, 0)
        operator.await_tiers([blocks, blocks])
        server.generate_with({"flexkv.session": "chat"}, PROMPT, ANSWER)
        assert f": removed {blocks} " in operator.remove_session("chat")
        assert operator.tiers() == [0, 0]
        server.flush()
        answer = server.generate(PROMPT, ANSWER)
        operator.await_tiers([blocks, blocks])
        assert ": cleared; host memory had " in operator.clear()
        assert operator.tiers() == [0, 0]
        server.flush()
        once_more = server.generate(PROMPT, ANSWER)
        assert (once_more.tokens, once_more.cached_tokens) == (answer.tokens, 0)
