# SPDX-License-Identifier: Apache-2.0
"""Engines with a disk below a small arena, and what tests do with their directories."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from integration.harness.answers import Completion
from integration.harness.checkpoint import TINY
from integration.harness.engine import Engine
from integration.tests.corpus import ABORTED, CONCURRENT, EVICTED, FLEXKV_BLOCK, Tokens
from integration.tests.steps import ask, have_told, whole_blocks

BLOCK_BYTES = FLEXKV_BLOCK * TINY.kv_bytes_per_token

SLOTS = 120
"""Of the arena: two of the prompts of ABORTED, half of CONCURRENT or all but all of EVICTED."""
ROOMY = 1600
"""Slots of a disk that holds all that the tests store."""
TIGHT = 150
"""Slots of a disk that holds a third of it: most writes go over what was there."""

PROMPTS = ABORTED + EVICTED + CONCURRENT
"""Whatever of these is asked for first has left the arena when the last has been."""

PATIENT_SECONDS = 600
"""Deadline of reads and writes of a disk that a busy machine slows down."""

# For a disk that hangs.
_SETTLE_SECONDS = 600.0

DAMAGE = bytes(0xFF for _ in range(256))
"""XORed over bytes of a block: its numbers get other signs and exponents, so that an engine that
computed on them would give other tokens."""


def gigabytes(slots: int) -> float:
    """A size in GiB with room for so many blocks, and for what is kept beside them: a percent."""
    return 1.01 * slots * BLOCK_BYTES / (1 << 30) + 1e-4


def settings(directory: Path, disk_slots: int = ROOMY) -> dict[str, Any]:
    """FlexKV's settings for a small arena and a disk."""
    return {
        "cpu_cache_gb": gigabytes(SLOTS),
        "ssd_cache_gb": gigabytes(disk_slots),
        "ssd_cache_dir": str(directory),
        # A slow disk must not look like a miss.
        "ssd_timeout_seconds": PATIENT_SECONDS,
    }


def restorable(prompts: Sequence[Tokens]) -> list[int]:
    """Tokens of each prompt that a cache can hold."""
    return [whole_blocks(len(prompt)) for prompt in prompts]


def restored(answers: Sequence[Completion]) -> list[int]:
    """Prompt tokens of each answer that were not computed."""
    return [answer.cached_tokens or 0 for answer in answers]


def warm_slots(engine: Engine) -> int:
    """Blocks that the engine found on disk when it started, as it said."""
    counts = re.findall(r"(\d+) of \d+ slots are warm", engine.log())
    assert len(counts) == 1, counts
    return int(counts[0])


def slab_files(directory: Path) -> list[Path]:
    """The files with blocks of the one engine that used `directory`."""
    return sorted(directory.glob("*/slab-*"))


def damage(rng: random.Random, directory: Path, share: float) -> int:
    """Change some bytes of that share of the slots, at random places; returns how many slots."""
    damaged = 0
    for path in slab_files(directory):
        with path.open("r+b") as file:
            for start in range(0, path.stat().st_size, BLOCK_BYTES):
                if rng.random() >= share:
                    continue
                place = start + rng.randrange(BLOCK_BYTES - len(DAMAGE))
                file.seek(place)
                there = file.read(len(DAMAGE))
                file.seek(place)
                file.write(bytes(a ^ b for a, b in zip(there, DAMAGE, strict=True)))
                damaged += 1
            file.flush()
            os.fsync(file.fileno())
    return damaged


def run_cli(*arguments: str) -> tuple[int, Any]:
    """Run `flexkv` with `--json`; its exit code, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "flexkv", *arguments, "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def settle(engine: Engine) -> None:
    """Wait until all that was stored is on disk, and nothing is on its way."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        have_told(engine)
        queues = [
            metric["value"]
            for metric in engine.metrics()
            if metric["name"] == "vllm:flexkv_queue_length"
        ]
        assert queues, "there is no such metric"
        if not any(queues):
            return
        assert time.monotonic() < deadline, queues


def ask_and_settle(engine: Engine, prompts: Iterable[Tokens]) -> list[Completion]:
    """As `ask_each`, but each only once the disk has what came before.

    What is being written keeps its place in host memory, and what finds none there is not cached:
    with a slow disk and a small arena it would be a matter of luck what is known in the end.
    """
    answers = []
    for prompt in prompts:
        answers.append(ask(engine, prompt))
        settle(engine)
    return answers
