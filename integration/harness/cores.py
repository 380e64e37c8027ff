# SPDX-License-Identifier: Apache-2.0
"""Which cores processes run on, and which an engine on a CPU computes with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable


def cores_of_ranks(ranks: int) -> str:
    """Which cores compute, for vLLM's CPU build: "0,1|2,3" are two ranks with two cores each.

    Left to itself vLLM keeps one core free for its other processes, and another one as soon as
    there is a connector, unless none is left then: on two cores an engine with a connector
    computes on two and one without on one. Engines must differ in nothing but the connector, so
    one core is always kept free if there is one. Two ranks it would refuse on one NUMA node.
    """
    cores = sorted(os.sched_getaffinity(0))
    computing = cores[:-1] if len(cores) > ranks else cores
    share = max(1, len(computing) // ranks)
    return "|".join(
        ",".join(str(computing[(rank * share + i) % len(computing)]) for i in range(share))
        for rank in range(ranks)
    )


def keep_on(pids: Iterable[int], cores: Collection[int]) -> None:
    """Let processes run on `cores` only, with all threads that they have and that these begin."""
    for pid in pids:
        # Threads end while others begin.
        with contextlib.suppress(FileNotFoundError):
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread, cores)
