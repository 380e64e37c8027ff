# SPDX-License-Identifier: Apache-2.0
"""The disk tier against fio and against vLLM's file-system tier, on the same directory.

All contenders move the same number of bytes in turns, so that what else the machine does hits all
alike. FlexKV's checksums are on; nobody else has any. Plain threads read the file of FlexKV.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from integration.bench import disk_fio
from integration.bench.disk_contenders import (
    Contender,
    Direction,
    FlexKV,
    Reader,
    Transfer,
    VllmFiles,
    random_memory,
)
from integration.bench.disk_latency import latency_row
from integration.bench.disk_plain import PlainThreads
from integration.bench.rows import Goal, Row
from integration.bench.scripts import DISK_INDEX, report_of
from integration.bench.setup import Bench

KIB, MIB = 1 << 10, 1 << 20
BLOCK_SIZES = (256 * KIB, MIB, 2 * MIB, 4 * MIB, 16 * MIB)
# fio's bound is for blocks that a cache of a real model has; smaller ones are for comparison.
LEAST_WITH_FIO_GOAL = MIB
DIRECTIONS: tuple[Direction, ...] = ("write", "read")
FIO_GOALS: dict[Direction, Goal] = {"write": Goal(">=", 0.85), "read": Goal(">=", 0.9)}
VLLM_GOAL = Goal(">=", 1.0)
SAMPLE_BYTES = 1 << 30
SETTLE_SECONDS = 2.0
FIO_WAYS = (disk_fio.ASYNCHRONOUS, disk_fio.THREADS)

Samples = dict[tuple[str, Direction], list[Transfer]]


def disk_rows(bench: Bench, say: Callable[[str], None]) -> list[Row]:
    """Bandwidth and processor time by size of block, loads under stores, index of a large store."""
    rows: list[Row] = []
    if not disk_fio.installed():
        say(disk_fio.HOW_TO_INSTALL)
    with tempfile.TemporaryDirectory(prefix="flexkv-disk-", dir=bench.disk_dir) as folder:
        memory = random_memory(SAMPLE_BYTES)
        for block_bytes in BLOCK_SIZES:
            say(f"disk: blocks of {_size(block_bytes)}")
            path = Path(folder, str(block_bytes))
            path.mkdir()
            ours = FlexKV(path / "flexkv", memory, block_bytes)
            others = _others(path, memory, block_bytes)
            plain = PlainThreads(ours)
            samples = _measure(ours, others, plain, bench.samples)
            rows += _bandwidth_rows(block_bytes, ours, others, plain, samples)
            _remove(path)
        say("disk: loads while stores saturate it")
        rows.append(latency_row(Path(folder, "latency"), memory))
    say("disk: index")
    return [*rows, *_index_rows(report_of(DISK_INDEX))]


def _remove(folder: Path) -> None:
    """Also lets the disk do what it does about freed space, such as a discard, so that this does
    not slow down what is measured next."""
    shutil.rmtree(folder)
    os.sync()
    time.sleep(SETTLE_SECONDS)


def _others(folder: Path, memory: mmap.mmap, block_bytes: int) -> list[Contender]:
    """vLLM, and fio's ways if it is there."""
    others: list[Contender] = [VllmFiles(folder / "vllm", memory, block_bytes)]
    if disk_fio.installed():
        others += [
            disk_fio.Fio(name, folder / "fio", SAMPLE_BYTES, block_bytes) for name in FIO_WAYS
        ]
    return others


def _measure(ours: FlexKV, others: Sequence[Contender], plain: Reader, rounds: int) -> Samples:
    """Each contender writes and reads once in each round; another one begins each round. `plain`
    reads what we wrote, after us in one round and before us in the next. All are closed in the
    end."""
    contenders = [ours, *others]
    samples: Samples = defaultdict(list)
    for number in range(rounds):
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            os.sync()  # what the one before left to the file system is not this one's work
            samples[contender.name, "write"].append(contender.write())
            readers: list[Reader] = [ours, plain] if contender is ours else [contender]
            for reader in readers if number % 2 else reversed(readers):
                samples[reader.name, "read"].append(reader.read())
    for contender in contenders:
        contender.close()
    return samples


def _bandwidth_rows(
    block_bytes: int,
    ours: Reader,
    others: Sequence[Reader],
    plain: Reader,
    samples: Samples,
) -> list[Row]:
    rows: list[Row] = []
    vllm, *ways_of_fio = others
    for direction in DIRECTIONS:
        what = f"disk {direction}, blocks of {_size(block_bytes)}"
        goal = FIO_GOALS[direction] if block_bytes >= LEAST_WITH_FIO_GOAL else None
        shown = [ours, *others]
        us = (ours, samples[ours.name, direction])
        if ways_of_fio:
            ways = [(way, samples[way.name, direction]) for way in ways_of_fio]
            better = max(ways, key=lambda way: _rate(way[1]))
            rows.append(_ratio_row(f"{what}, FlexKV ÷ fio", goal, us, better))
        else:
            reason = f"not measured: {disk_fio.HOW_TO_INSTALL}"
            rows.append(Row(f"{what}, FlexKV ÷ fio", 0.0, "ratio", goal, reason))
        them = (vllm, samples[vllm.name, direction])
        rows.append(_ratio_row(f"{what}, FlexKV ÷ vLLM", VLLM_GOAL, us, them))
        if direction == "read":
            same = (plain, samples[plain.name, direction])
            rows.append(_ratio_row(f"{what}, FlexKV ÷ plain threads", None, us, same))
            shown.append(plain)
        rows.append(_cpu_row(f"{what}, processor time of FlexKV", direction, shown, samples))
    return rows


def _ratio_row(
    what: str,
    goal: Goal | None,
    ours: tuple[Reader, Sequence[Transfer]],
    theirs: tuple[Reader, Sequence[Transfer]],
) -> Row:
    """Bandwidth of `ours` ÷ that of `theirs`, each with its samples."""
    (us, our_samples), (them, their_samples) = ours, theirs
    our_rate, their_rate = _rate(our_samples), _rate(their_samples)
    return Row(
        what=what,
        value=our_rate / their_rate,
        unit="ratio",
        goal=goal,
        detail=(
            f"{our_rate:.2f} GB/s ÷ {them.name} {their_rate:.2f} GB/s ({them.how}), "
            f"medians of {len(our_samples)}"
        ),
        samples={
            us.name: [sample.gb_per_s for sample in our_samples],
            them.name: [sample.gb_per_s for sample in their_samples],
        },
        unit_of_samples="GB/s",
    )


def _cpu_row(
    what: str, direction: Direction, contenders: Sequence[Reader], samples: Samples
) -> Row:
    """Seconds of processor time for each GB, of all threads; the kernel's part is in it as far as
    the system books it on the process."""
    costs = {
        contender.name: [sample.cpu_seconds_per_gb for sample in samples[contender.name, direction]]
        for contender in contenders
    }
    medians = {name: statistics.median(each) for name, each in costs.items()}
    own, *others = medians
    return Row(
        what=what,
        value=medians[own],
        unit="s/GB",
        goal=None,
        detail=", ".join(f"{name} {medians[name]:.3f} s/GB" for name in others),
        samples=costs,
        unit_of_samples="s/GB",
    )


def _index_rows(report: list[dict[str, Any]]) -> list[Row]:
    opened, *memory = report
    slots = f"{opened['slots']:,} slots"
    rows = [
        Row(
            what=f"disk, a full table of {slots} opened",
            value=opened["seconds"],
            unit="s",
            goal=Goal("<=", 2),
            detail=f"table file to index, not in the page cache; median of {opened['repeats']}",
            samples={"FlexKV": opened["samples"]},
        )
    ]
    for row in memory:
        resident, traced = row["resident"], row["traced"]
        rows.append(
            Row(
                what=f"disk, memory of the index for each of {slots}, {row['case']}",
                value=max(resident, traced),
                unit="bytes",
                goal=Goal("<=", 200),
                detail=f"the larger: resident memory {resident:.0f}, Python's objects {traced:.0f}",
            )
        )
    return rows


def _rate(samples: Sequence[Transfer]) -> float:
    """Median, in GB/s."""
    return statistics.median(sample.gb_per_s for sample in samples)


def _size(block_bytes: int) -> str:
    if block_bytes < MIB:
        return f"{block_bytes // KIB} KiB"
    return f"{block_bytes // MIB} MiB"
