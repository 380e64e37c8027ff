# SPDX-License-Identifier: Apache-2.0
"""A node of Mooncake Store that lends memory and does nothing else, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from integration.harness.store_process import StoreProcess

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

_GIB = 1 << 30
_LOCAL_BYTES = 16 << 20
WRONG = b"\xff" * 256
"""As numbers of a block, NaN: an engine that computed on them would give other tokens."""
_ROOT = Path(__file__).resolve().parents[2]


class MooncakeLender(StoreProcess):
    """See `StoreProcess`.

    Args:
        settings: of FlexKV, which name the master and how much memory a node lends.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        super().__init__()

    def damage(self, names: list[str]) -> None:
        """Write `WRONG` into the middle of each object that is still there."""
        self._tell(names)

    def _launch(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(self._settings)],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        _read_line(process)
        return process

    def _tell(self, names: list[str]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(names) + "\n")
        self._process.stdin.flush()
        _read_line(self._process)


def connect(settings: dict[str, Any], segment_bytes: int) -> MooncakeDistributedStore:
    """A client of its own, which lends so many bytes."""
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    address = settings["mooncake_master"]
    metadata = settings["mooncake_metadata"]
    host = address.partition(":")[0]
    code = client.setup(host, metadata, segment_bytes, _LOCAL_BYTES, "tcp", "", address)
    if code != 0:
        raise RuntimeError(f"Mooncake's setup ended with code {code}")
    return client


def _read_line(process: subprocess.Popen[str]) -> None:
    """Wait until it has done what it was told."""
    assert process.stdout is not None
    if not process.stdout.readline():
        raise RuntimeError(f"a node that lends memory ended with {process.wait()}")


def _damage(client: MooncakeDistributedStore, name: str) -> None:
    data = bytearray(client.get(name))
    if not data:
        return  # evicted, or removed
    place = len(data) // 2
    data[place : place + len(WRONG)] = WRONG
    # A put does not overwrite. Forced, since reads hold leases.
    client.batch_remove([name], True)
    client.put(name, bytes(data))


def main() -> None:
    """Lend memory until the input ends. Each line of it names objects to be damaged."""
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for what Mooncake prints: no answer
    client = connect(settings, int(settings["mooncake_segment_gb"] * _GIB))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        for name in json.loads(line):
            _damage(client, name)
        print("done", file=answers, flush=True)
    client.close()


if __name__ == "__main__":
    main()
