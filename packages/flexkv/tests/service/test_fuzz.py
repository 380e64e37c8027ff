# SPDX-License-Identifier: Apache-2.0
"""Whatever processes of this user send, write and hand over: the service goes on, the other engines
load right bytes, and nothing grows."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from flexkv.service import messages as wire
from flexkv.service.state import state_of
from packages.flexkv.tests.service.hostile import Chance
from packages.flexkv.tests.service.served import FORMAT, keys_of, until
from packages.flexkv.tests.service.traffic import Traffic

SECONDS = float(os.environ.get("SERVICE_FUZZ_SECONDS", "3"))
"""How long; the longer, the more is tried."""
SLOTS = 512
ROOT = Path(__file__).parents[4]
_GROWTH, _MORE_FILES = 64 << 20, 64
"""Bytes and descriptors that the service may grow by after the first round: those of pools of other
fingerprints."""


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory_of(pid: int) -> int:
    """Bytes of memory that the process has for itself."""
    status = Path(f"/proc/{pid}/status").read_text().split()
    return int(status[status.index("RssAnon:") + 1]) << 10


def test_the_hostile_peers_send_each_kind_of_message() -> None:
    chance = Chance(11)
    assert {type(chance.message()) for _ in range(2000)} == set(wire.ToService.__subclasses__())


def test_nothing_that_peers_do_harms_others(tmp_path: Path) -> None:
    root = str(tmp_path / "service")
    bucket = tmp_path / "bucket"
    bucket.mkdir(mode=0o700)
    environ = os.environ | {
        "FLEXKV_CPU_CACHE_GB": str(SLOTS * FORMAT.slot_bytes / (1 << 30)),
        "FLEXKV_RUNTIME_DIR": str(tmp_path / "runtime"),
        "FLEXKV_SSD_CACHE_DIR": str(tmp_path / "disk"),
        "FLEXKV_SSD_CACHE_GB": "0.01",
        "FLEXKV_TENANT_SHARES": "a=50",
        **({"FLEXKV_OBJECTS_URL": f"file://{bucket}"} if find_spec("obstore") else {}),
    }
    log = (tmp_path / "log").open("w+")
    command = [sys.executable, "-m", "flexkv", "serve", root]
    service = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environ)
    rng = random.Random(11)
    rounds = 0
    first: tuple[int, int] | None = None
    try:
        assert service.stdout is not None
        assert "listens" in service.stdout.readline()
        good = Traffic(root, rng)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end or rounds < 2:
            rounds += 1
            seed = str(rng.randrange(1 << 32))
            with subprocess.Popen(
                [sys.executable, "-m", "packages.flexkv.tests.service.hostile", root, seed],
                cwd=ROOT,
            ) as hostile:
                while hostile.poll() is None:
                    good.step()
                assert hostile.returncode == 0, f"seed {seed}"
            assert service.poll() is None, f"seed {seed}"
            until(lambda: engines_of(root) == 1, good.step)
            last = files_of(service.pid), memory_of(service.pid)
            first = first or last
        while good.begun:
            good.end(0)
        keys = keys_of("last", 3)
        until(lambda: good.engine.store(keys) and good.engine.load(keys), good.engine.cache.poll)
        assert good.loaded
        assert good.stored
        assert first is not None
        assert last[0] - first[0] < _MORE_FILES
        assert last[1] - first[1] < _GROWTH
        good.engine.close()
    finally:
        service.kill()
        service.communicate()
        log.seek(0)
        said = log.read()
        log.close()
    assert "Traceback" not in said, said[said.index("Traceback") - 500 :][:3000]


def engines_of(root: str) -> int:
    """How many engines have the fingerprint of the good one, in any pool."""
    return sum(len(each.engines) for each in state_of(root).pools if each.fingerprint == "same")
