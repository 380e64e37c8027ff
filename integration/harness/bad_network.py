# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces with a link between them that delays and drops real IP packets.

Each end of the link is a TUN device. A process of its own, this file, carries the packets, so that
a kernel without netem serves as well. Needs root. Processes outside the namespaces reach the far
end by a relay.

    with BadNetwork() as network:
        subprocess.run([*network.near, "COMMAND"])
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import heapq
import io
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

NEAR, FAR = "10.99.0.1", "10.99.0.2"
"""Addresses of the two ends. No packet leaves the namespaces."""

_TUN = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_DEVICE = "bad0"
_CLONE_NEWNET = 0x40000000
_PACKET = 1 << 16


def possible() -> str | None:
    """Why there can be no `BadNetwork` on this machine; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not _TUN.exists():
        return f"there is no {_TUN}"
    tried = subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "`unshare --net ip link` fails"


class BadNetwork:
    """The link is as good as it gets until `set` is called. A context manager that ends it.

    Attributes:
        near, far: what runs a command line in one of the namespaces.
    """

    def __init__(self) -> None:
        self._holder = self._begin("unshare", "--net", "sleep", "infinity")
        self._await_namespace(self._holder.pid)
        self._carrier = self._begin(
            *("unshare", "--net", sys.executable, __file__, str(self._holder.pid))
        )
        assert self._carrier.stdout is not None
        assert self._carrier.stdout.readline() == "ready\n"
        self.near = ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net"]
        self.far = ["nsenter", f"--net=/proc/{self._carrier.pid}/ns/net"]
        for command, address in ((self.near, NEAR), (self.far, FAR)):
            for arguments in (
                ("link", "set", "lo", "up"),
                ("addr", "add", f"{address}/30", "dev", _DEVICE),
                ("link", "set", _DEVICE, "up"),
            ):
                subprocess.run([*command, "ip", *arguments], check=True)
        self._relays: list[subprocess.Popen[str]] = []

    def __enter__(self) -> BadNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._relays, self._carrier, self._holder):
            process.kill()
            process.communicate()

    def set(self, delay: float = 0.0, loss: float = 0.0) -> None:
        """From now on each packet takes so many seconds, in either direction, and that share of
        them is lost."""
        assert self._carrier.stdin is not None
        self._carrier.stdin.write(json.dumps([delay, loss]) + "\n")
        self._carrier.stdin.flush()

    def relay(self, port: int) -> int:
        """A port of 127.0.0.1 in the namespace of this process. What connects to it is connected,
        over the link, to `port` at the far end."""
        self._relays.append(self._begin(sys.executable, __file__, str(self._holder.pid), str(port)))
        said = self._relays[-1].stdout
        assert said is not None
        return int(said.readline())

    @staticmethod
    def _begin(*command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @staticmethod
    def _await_namespace(pid: int) -> None:
        """Wait until `unshare` has done its work."""
        own = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{pid}/ns/net") == own:
            time.sleep(0.01)


def carry(commands: io.FileIO, ends: tuple[int, int], rng: random.Random) -> None:
    """Carry packets between two devices until `commands` ends. Each of its lines is a delay in
    seconds and a share of packets that are lost."""
    delay = loss = 0.0
    waiting: list[tuple[float, int, int, bytes]] = []
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    number = 0
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([commands.fileno(), *ends], [], [], timeout)
        now = time.monotonic()
        for end in ready:
            if end == commands.fileno():
                line = commands.readline()
                if not line:
                    return
                delay, loss = json.loads(line)
            else:
                packet = os.read(end, _PACKET)
                if rng.random() >= loss:
                    number += 1
                    heapq.heappush(waiting, (now + delay, number, other[end], packet))
        while waiting and waiting[0][0] <= now:
            _, _, end, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # the device is not up yet
                os.write(end, packet)


def _open_device() -> int:
    """A TUN device in the namespace of this process."""
    device = os.open(_TUN, os.O_RDWR)
    request = struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(device, _TUNSETIFF, request)
    return device


def _enter(pid: int) -> None:
    """Move this process into the network namespace of another one."""
    with open(f"/proc/{pid}/ns/net", "rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


async def pass_on(listener: socket.socket, port: int) -> None:
    """Connect each connection to a port at the far end, until this process is killed."""

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_PACKET):
                sink.write(data)
                await sink.drain()
        sink.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(FAR, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    server = await asyncio.start_server(connect, sock=listener)
    await server.serve_forever()


def main() -> None:
    """`bad_network.py PID`: from the namespace of this process to that of another one.
    `bad_network.py PID PORT`: a relay from this namespace, which connects from that of PID."""
    if len(sys.argv) > 2:
        listener = socket.create_server(("127.0.0.1", 0))
        _enter(int(sys.argv[1]))
        print(listener.getsockname()[1], flush=True)
        asyncio.run(pass_on(listener, int(sys.argv[2])))
        return
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    far = _open_device()
    _enter(int(sys.argv[1]))
    near = _open_device()
    # Back, so that this process keeps its own namespace alive, and others find it there.
    if ctypes.CDLL(None, use_errno=True).setns(own, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    print("ready", flush=True)
    # Unbuffered, so that `select` sees each line.
    with open(sys.stdin.fileno(), "rb", buffering=0) as commands:
        carry(commands, (near, far), random.Random(1))


if __name__ == "__main__":
    main()
