# SPDX-License-Identifier: Apache-2.0
"""The real command, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from packages.flexkv.tests.cli.stores import Cache, Ended, Flexkv, FlexkvOnTerminal


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def flexkv() -> Flexkv:
    """Runs `flexkv` with the given arguments; neither its input nor its output is a terminal."""

    def run(*arguments: object) -> Ended:
        command = [sys.executable, "-m", "flexkv", *map(str, arguments)]
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert "Traceback" not in ended.stderr, ended.stderr
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    return run


@pytest.fixture
def flexkv_on_terminal() -> FlexkvOnTerminal:
    """Runs `flexkv` with the given arguments on a terminal, and types `answer`."""

    def run(*arguments: object, answer: str = "") -> Ended:
        master, slave = os.openpty()
        command = [sys.executable, "-m", "flexkv", *map(str, arguments)]
        environment = {**os.environ, "TERM": "xterm"}
        os.write(master, answer.encode())
        process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment
        )
        os.close(slave)
        shown = b""
        # A terminal that all have left reads as an error.
        with contextlib.suppress(OSError):
            while part := os.read(master, 1 << 16):
                shown += part
        os.close(master)
        return Ended(process.wait(), shown.decode(), "")

    return run
