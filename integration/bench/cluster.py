# SPDX-License-Identifier: Apache-2.0
"""Mooncake Store below FlexKV without an engine, against Mooncake's own calls.

All runs on this machine, over TCP on the loopback interface: the master, the node that lends
memory, and what is measured share its cores.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from integration.bench.rows import Goal, Row
from integration.bench.setup import Bench
from integration.harness.mooncake_lender import MooncakeLender
from integration.harness.mooncake_master import MooncakeMaster

KIB, MIB = 1 << 10, 1 << 20
SIZES = (512 * KIB, 2 * MIB, 8 * MIB)
SAMPLE_BYTES = 128 * MIB
SEGMENT_GB = 2.0
_ROOT = Path(__file__).resolve().parents[2]
Say = Callable[[str], None]
Samples = dict[str, list[float]]


def store_rows(bench: Bench, say: Say) -> list[Row]:
    """All rows about blocks that one process moves, and questions."""
    if importlib.util.find_spec("mooncake") is None:
        raise RuntimeError("Mooncake Store is not installed: pip install 'flexkv[mooncake]'")
    rows: list[Row] = []
    with (
        MooncakeMaster(segment_gb=SEGMENT_GB) as master,
        MooncakeLender(master.settings),
    ):
        for size in SIZES:
            say(f"cluster: blocks of {size // KIB} KiB")
            count = SAMPLE_BYTES // size
            found = _node(master, "blocks", size, count, bench.samples)
            rows += [_block_row(size, verb, found) for verb in ("put", "get")]
        say("cluster: questions")
        rows.append(_question_row(_node(master, "questions", bench.samples)))
    return rows


def start_node(master: MooncakeMaster, role: str, *numbers: int) -> subprocess.Popen[str]:
    """A process of `cluster_node`; see there for roles and their numbers."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "integration.bench.cluster_node", role),
            *(json.dumps(master.settings), *map(str, numbers)),
        ],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if role in ("blocks", "questions") else None,
        text=True,
    )


def _node(master: MooncakeMaster, role: str, *numbers: int) -> Samples:
    """What a process measures."""
    with start_node(master, role, *numbers) as process:
        out, errors = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{role} ended with {process.returncode}: {errors[-2000:]}")
    found: Samples = json.loads(out.splitlines()[-1])
    return found


def _best(found: Samples, verb: str) -> float:
    """Seconds of Mooncake's fastest way, by the median."""
    return min(
        statistics.median(taken)
        for name, taken in found.items()
        if name.startswith(f"Mooncake {verb}")
    )


def _block_row(size: int, verb: str, found: Samples) -> Row:
    ours, theirs = statistics.median(found[f"FlexKV {verb}"]), _best(found, verb)
    return Row(
        what=f"Mooncake, {verb} of blocks of {size // KIB} KiB, FlexKV ÷ Mooncake's own calls",
        value=theirs / ours,
        unit="ratio",
        goal=Goal(">=", 0.9),
        detail=(
            f"{SAMPLE_BYTES / ours / 1e9:.2f} GB/s ÷ {SAMPLE_BYTES / theirs / 1e9:.2f} GB/s, "
            f"medians of {len(found[f'FlexKV {verb}'])}, Mooncake's fastest of 1, 4 and 8 threads"
        ),
        samples=found,
    )


def _question_row(found: Samples) -> Row:
    ours, theirs, both = (
        statistics.median(found[name]) for name in ("FlexKV", "Mooncake", "Mooncake, two threads")
    )
    return Row(
        what="existence checks per second, 64 in a question, FlexKV ÷ Mooncake's own call",
        value=ours / theirs,
        unit="ratio",
        goal=None,
        detail=f"{ours:,.0f} ÷ {theirs:,.0f}; two threads of Mooncake's: {both:,.0f}",
        samples=found,
        unit_of_samples="1/s",
    )
