# SPDX-License-Identifier: Apache-2.0
"""Dynamo's KV router and its index of KV blocks, in a process of their own."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

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


class DynamoRouter:
    """Dynamo's router; see `dynamo_router`. A context manager that ends it.

    Args:
        python: with Dynamo; see `environment.python`.
        arguments: of the process.
        log: file for the output of the process.
    """

    def __init__(self, python: Path, arguments: Sequence[object], log: Path) -> None:
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [python, "-m", "integration.clients.dynamo_router", *map(str, arguments)],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._answer() == "ready"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, **question: Any) -> Any:
        """Ask one question, and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

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


class DynamoIndex(DynamoRouter):
    """What the router knows of one engine, whose events it follows.

    Args:
        python: with Dynamo; see `environment.python`.
        events: the engine's ZeroMQ address of events.
        block_tokens: of the engine's blocks.
        log: file for the output of the process.
    """

    def __init__(self, python: Path, events: str, block_tokens: int, log: Path) -> None:
        self._block_tokens = block_tokens
        super().__init__(python, ("", block_tokens, 0.75, 0.25, events), log)

    def tokens(self, prompt: Sequence[int]) -> Known:
        """What the index knows of a prompt."""
        (blocks,) = self.ask(known=list(prompt)).values()
        return Known(*(count * self._block_tokens for count in blocks))

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait until the index has followed events so far that a condition holds."""
        late = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < late, "the index does not know it"
            time.sleep(0.05)
