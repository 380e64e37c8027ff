# SPDX-License-Identifier: Apache-2.0
"""Joins a Mooncake Store. Run as a program, tries whether it can be joined.

Mooncake holds the interpreter's lock while it joins. If the master hangs, Mooncake tries 20 times,
and all threads of the process wait meanwhile. So another process tries first.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys

from mooncake.store import MooncakeDistributedStore

from flexkv.settings import CacheConfig
from flexkv.tiers.mooncake.member import MooncakeError

_REACH_SECONDS = 5.0
"""Seconds that the master may take to accept a connection. Not tuned."""

JOIN_SECONDS = 15.0
"""Seconds in which a process must have joined the store. Not tuned."""

_ANSWER = b"code: "

_LOCAL_BYTES = 16 << 20
"""Bytes that Mooncake registers for calls that FlexKV does not use. Not tuned."""


def join(config: CacheConfig, segment_bytes: int) -> MooncakeDistributedStore:
    """Join the store, and lend it a segment of memory. Waits for `JOIN_SECONDS` and a few seconds
    more at most. Raises MooncakeError if Mooncake refuses, or does not end in time; OSError if the
    master cannot be reached."""
    master = str(config.mooncake_master)
    # First, because Mooncake tries for 90 s to reach a master that is not there, and notices no
    # master that comes meanwhile.
    own = own_address(master)

    def setup(lent: int) -> list[object]:
        protocol, device = config.mooncake_protocol, config.mooncake_device
        return [own, config.mooncake_metadata, lent, _LOCAL_BYTES, protocol, device, master]

    _try_elsewhere(setup(0))
    client = MooncakeDistributedStore()
    code = client.setup(*setup(segment_bytes))
    if code:
        client.close()
        raise _refusal(code)
    return client


def _try_elsewhere(setup: list[object]) -> None:
    """Join the store in another process that lends nothing and ends."""
    try:
        tried = subprocess.run(
            [sys.executable, "-m", __name__, json.dumps(setup)],
            timeout=JOIN_SECONDS,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MooncakeError(f"it could not be joined within {JOIN_SECONDS:g} s") from None
    answer = tried.stdout.rpartition(_ANSWER)[2].strip()
    if answer != b"0":
        raise _refusal(int(answer)) if answer else MooncakeError("Mooncake's client ended early")


def _refusal(code: int) -> MooncakeError:
    return MooncakeError(f"code {code} of Mooncake's client")


def own_address(master: str) -> str:
    """This machine's address on the route to the master, by which other nodes reach it; an IPv6
    address is in brackets. If etcd names the master, the address on the route to etcd. Raises
    OSError if neither the master nor a server of etcd can be reached."""
    *others, last = re.split("[;,]", master.removeprefix("etcd://"))
    for server in others:
        with contextlib.suppress(OSError):
            return _own_address_towards(server)
    return _own_address_towards(last)


def _own_address_towards(server: str) -> str:
    host, _, port = server.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS) as probe:
        own = str(probe.getsockname()[0])
    return f"[{own}]" if ":" in own else own


def main() -> None:
    """Try to join with the arguments of Mooncake's client that the first argument has."""
    client = MooncakeDistributedStore()
    code = client.setup(*json.loads(sys.argv[1]))
    # Mooncake may have printed, too.
    print(f"\n{_ANSWER.decode()}{code}", flush=True)
    # A client whose master etcd names takes 30 s to close. The master forgets one that is gone.
    os._exit(0)


if __name__ == "__main__":
    main()
