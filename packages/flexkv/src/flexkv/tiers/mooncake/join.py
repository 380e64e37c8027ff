# SPDX-License-Identifier: Apache-2.0
"""Joins a Mooncake Store. Run as a program, tries whether it can be joined.

Mooncake holds the interpreter's lock while it joins. If the master hangs, Mooncake tries 20 times,
and all threads of the process wait meanwhile. So another process tries first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass

from mooncake.store import MooncakeDistributedStore

from flexkv.tiers.mooncake.member import MooncakeError

_REACH_SECONDS = 5.0
"""Seconds that the master may take to accept a connection. Not tuned."""

JOIN_SECONDS = 15.0
"""Seconds in which a process must have joined the store. Not tuned."""


_ANSWER = b"code: "

_LOCAL_BYTES = 16 << 20
"""Bytes that Mooncake registers for calls that FlexKV does not use. Not tuned."""


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """The settings `mooncake_...`, each without that prefix; `segment_bytes` is in bytes."""

    master: str
    metadata: str
    protocol: str
    device: str
    segment_bytes: int
    replicas: int


def join(settings: MooncakeSettings) -> MooncakeDistributedStore:
    """Join the store. Waits for `JOIN_SECONDS` and a few seconds more at most.

    Raises:
        MooncakeError: Mooncake refuses, or does not end in time.
        OSError: the master cannot be reached.
    """
    # First, because Mooncake tries for 90 s to reach a master that is not there, and notices no
    # master that comes meanwhile.
    own = own_address(settings.master)
    _try_elsewhere(settings, own)
    client, code = _set_up(settings, own)
    if code:
        client.close()
        raise _refusal(code)
    return client


def _try_elsewhere(settings: MooncakeSettings, own: str) -> None:
    """Join the store in another process that lends nothing and ends."""
    given = dataclasses.asdict(dataclasses.replace(settings, segment_bytes=0))
    try:
        tried = subprocess.run(
            [sys.executable, "-m", __name__, json.dumps(given), own],
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


def _set_up(settings: MooncakeSettings, own: str) -> tuple[MooncakeDistributedStore, int]:
    """A client, and the code of its attempt to join."""
    client = MooncakeDistributedStore()
    code = client.setup(
        own,
        settings.metadata,
        settings.segment_bytes,
        _LOCAL_BYTES,
        settings.protocol,
        settings.device,
        settings.master,
    )
    return client, code


def _refusal(code: int) -> MooncakeError:
    return MooncakeError(f"code {code} of Mooncake's client")


def own_address(master: str) -> str:
    """This machine's address on the route to the master, by which other nodes reach it; an IPv6
    address is in brackets. If etcd names the master, the address on the route to etcd.

    Raises:
        OSError: neither the master nor a server of etcd can be reached.
    """
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
    """Try the settings of the first argument with the own address of the second."""
    _, code = _set_up(MooncakeSettings(**json.loads(sys.argv[1])), sys.argv[2])
    # Mooncake may have printed, too.
    print(f"\n{_ANSWER.decode()}{code}", flush=True)
    # A client whose master etcd names takes 30 s to close. The master forgets one that is gone.
    os._exit(0)


if __name__ == "__main__":
    main()
