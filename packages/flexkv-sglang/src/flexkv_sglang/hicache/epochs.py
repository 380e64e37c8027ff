# SPDX-License-Identifier: Apache-2.0
"""The epochs of keys that the ranks of an engine share without asking each other.

SGLang clears a backend in all of its ranks. Ranks that share pages have to name them by the same
keys then, which no other server may use.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

from flexkv.engine.key_epoch import KeyEpoch

_START = 19
"""The field of /proc/PID/stat behind the name, counted from 0, that has the start of a process."""


@functools.cache
def engine_name() -> str:
    """A name for the processes that the process above this one has started: SGLang's ranks on this
    machine. It is that of no other time."""
    above = os.getppid()
    fields = Path(f"/proc/{above}/stat").read_text(encoding="ascii", errors="replace")
    began = fields.rpartition(")")[2].split()[_START]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    text = f"{boot} {above} {began}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@functools.cache
def epoch_of(fingerprint: str) -> KeyEpoch:
    """The epoch of the keys of these pages. It outlives a backend: one that SGLang attaches later
    must not find what was cleared."""
    return KeyEpoch(f"{engine_name()} {fingerprint}".encode())
