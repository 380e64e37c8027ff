# SPDX-License-Identifier: Apache-2.0
"""Sessions for tests: led by this process, or by another."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from flexkv.host.arena import ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.session import Session, Shard, lead
from flexkv.system.available import Promise

SHARD_BYTES = 8192


def shard(rank: int, fingerprint: str = "same", stage: int = 0) -> Shard:
    return Shard(rank, fingerprint, 2, SHARD_BYTES, stage=stage)


def plan(block_format: BlockFormat, promised: Sequence[Promise] = ()) -> ArenaSpec:
    return ArenaSpec(block_format, 4)


@contextlib.contextmanager
def led(root: Path, name: str = "engine", ranks: int = 1) -> Iterator[Session]:
    session = lead(str(root), name, shard(0), ranks, plan, threads=1)
    try:
        yield session
    finally:
        session.close()


LEADER = """
import sys, time
from flexkv.host.arena import ArenaSpec
from flexkv.session import Shard, lead
session = lead(sys.argv[1], sys.argv[2], Shard(0, "same", 2, 8192), 1,
               lambda fmt, promised: ArenaSpec(fmt, 4), threads=1)
print("leading", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def leading_process(root: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LEADER, str(root), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "leading\n"
            yield process
        finally:
            process.kill()
