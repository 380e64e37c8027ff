# SPDX-License-Identifier: Apache-2.0
"""How much memory an arena takes."""

from __future__ import annotations

import re
from pathlib import Path


def resident(address: int) -> int:
    """Bytes that the arena mapped at `address` takes, swapped out or not (proc(5), smaps); 0 if
    none is mapped there."""
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            # What else is mapped there by now is none of ours.
            inside = int(span[1], 16) <= address < int(span[2], 16) and "flexkv-arena" in line
        elif inside and line.startswith(("Rss:", "Swap:", "Shared_Hugetlb:", "Private_Hugetlb:")):
            total += int(line.split()[1]) * 1024
    return total
