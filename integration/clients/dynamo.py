# SPDX-License-Identifier: Apache-2.0
"""Dynamo's index of KV blocks, asked by tests."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).parents[2]
_PATIENCE_SECONDS = 60.0


class Known(NamedTuple):
    """Tokens at the beginning of a prompt that an engine has.

    Attributes:
        own: in its own memory.
        host: there or in host memory.
        disk: there, in host memory or on disk.
    """

    own: int
    host: int
    disk: int


class DynamoIndex:
    """Dynamo's index in a process of its own, which follows the events of one engine.

    Args:
        python: with Dynamo; see `environment.python`.
        events: the engine's ZeroMQ address of events.
        block_tokens: of the engine's blocks.
        log: file for the output of the process.
    """

    def __init__(self, python: Path, events: str, block_tokens: int, log: Path) -> None:
        self._block_tokens = block_tokens
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [python, "-m", "integration.clients.dynamo_index", events, str(block_tokens)],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._answer() == "ready"

    def tokens(self, prompt: Sequence[int]) -> Known:
        """What the index knows of a prompt."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(prompt)) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        names = ("device_blocks", "host_pinned_blocks", "disk_blocks")
        return Known(*(found[name] * self._block_tokens for name in names))

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait until the index has followed events so far that a condition holds."""
        late = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < late, "the index does not know it"
            time.sleep(0.05)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, Path(self._log.name).read_text()[-4000:]
        return json.loads(line)
