# SPDX-License-Identifier: Apache-2.0
"""Fixtures that run the command."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from packages.flexkv.tests.cli import command
from packages.flexkv.tests.cli.command import Fork
from packages.flexkv.tests.cli.stores import Cache, Ended, Flexkv, FlexkvOnTerminal


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def flexkv() -> Flexkv:
    """Runs `flexkv` with the given arguments; neither its input nor its output is a terminal."""
    return command.run


@pytest.fixture
def flexkv_on_terminal() -> FlexkvOnTerminal:
    """Runs `flexkv` with the given arguments on a terminal, and types `answer`."""

    def run(*arguments: object, answer: str = "") -> Ended:
        master, slave = os.openpty()
        os.write(master, answer.encode())
        environ = {**os.environ, "TERM": "xterm"}
        process = Fork(*arguments, environ=environ, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        shown = b""
        # A terminal that all have left reads as an error.
        with contextlib.suppress(OSError):
            while part := os.read(master, 1 << 16):
                shown += part
        os.close(master)
        return Ended(process.wait(), shown.decode(), "")

    return run
