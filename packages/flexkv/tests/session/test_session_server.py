# SPDX-License-Identifier: Apache-2.0
"""Rank 0's end: what any peer may do to it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sessions import SHARD_BYTES, led, plan, shard

from flexkv import ArenaError
from flexkv.host.arena import Arena
from flexkv.layout import BlockFormat
from flexkv.session import SessionInfo, attach, join, wire
from flexkv.session.session_server import Server
from packages.inside import arrived_shards, waiting_schedulers
from packages.patience import wait_until


@pytest.mark.parametrize(
    "greeting",
    [
        b"\xff\xfe",
        b"[]",
        b'{"rank": {"rank": "x"}}',
        b'{"rank": 7}',
        b"{",
        b"{}",
        b'{"other": 1}',
        b"[" * 60_000,
        b'{"rank":{"x":' + b"[" * 60_000,
    ],
)
def test_malformed_greetings_are_refused_and_lose_nothing(tmp_path: Path, greeting: bytes) -> None:
    with led(tmp_path):
        with connected(tmp_path) as peer:
            peer.sendall(greeting)
            assert "not a FlexKV greeting" in json.loads(peer.recv(65536))["error"]
        attach(str(tmp_path), "engine").close()


@contextlib.contextmanager
def connected(root: Path) -> Iterator[socket.socket]:
    (path,) = root.glob("*.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        with contextlib.chdir(root):  # the whole path may be too long for an address
            peer.connect(path.name)
        yield peer


def test_a_peer_that_says_nothing_keeps_nobody_waiting(tmp_path: Path) -> None:
    with led(tmp_path), contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connected(tmp_path))
        attach(str(tmp_path), "engine").close()


def test_shards_are_in_the_order_of_ranks_and_not_of_arrival(tmp_path: Path) -> None:
    shards = [replace(shard(rank), shard_bytes=SHARD_BYTES * (1 + rank)) for rank in range(4)]
    server = Server(str(tmp_path), "engine", 4)
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        for count, rank in enumerate((3, 1, 2), 1):
            peer = stack.enter_context(connected(tmp_path))
            wire.send(peer, wire.Greeting(rank=shards[rank]))
            wait_until(lambda: arrived_shards(server) == count)  # noqa: B023
        assert server.gather(shards[0], 1) == shards


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_too_many_is_refused(tmp_path: Path, rank: int) -> None:
    server = Server(str(tmp_path), "engine", 2)
    with contextlib.closing(server), connected(tmp_path) as first:
        wire.send(first, wire.Greeting(rank=shard(1)))
        server.gather(shard(0), 60)
        with pytest.raises(ArenaError, match="'engine' is owned by the living process"):
            join(str(tmp_path), "engine", shard(rank), patience=60)


def test_of_schedulers_that_wait_for_the_arena_one_gets_it(tmp_path: Path) -> None:
    server = Server(str(tmp_path), "engine", 1)
    arena = Arena.create(plan(BlockFormat(2, (SHARD_BYTES,))), 1)
    with contextlib.ExitStack() as stack:
        stack.callback(arena.close)
        stack.callback(server.close)
        peers = [stack.enter_context(connected(tmp_path)) for _ in range(3)]
        for count, peer in enumerate(peers, 1):
            wire.send(peer, wire.Greeting(scheduler=count))
            wait_until(lambda: waiting_schedulers(server) == count)  # noqa: B023
        server.hand_out(SessionInfo("same", arena.spec), arena.fd)
        answer, fd = wire.receive(peers[0], wire.Answer)
        assert answer == wire.Answer(SessionInfo("same", arena.spec))
        assert fd is not None
        os.close(fd)
        for peer in peers[1:]:
            answer, fd = wire.receive(peer, wire.Answer)
            assert answer is not None
            assert "one scheduler in its life" in answer.error
            assert fd is None


def test_the_next_engine_can_have_the_name_at_once(tmp_path: Path) -> None:
    """Also while a thread of the last one is about to accept."""
    for _ in range(50):
        with led(tmp_path):
            attach(str(tmp_path), "engine").close()


def test_a_closed_server_leaves_the_next_ones_socket(tmp_path: Path) -> None:
    first = Server(str(tmp_path), "engine", 1)
    first.close()
    with led(tmp_path):
        first.close()
        attach(str(tmp_path), "engine").close()


OTHER_USER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
    peer.settimeout(60)
    peer.connect(sys.argv[1])
    print(peer.recv(65536).decode())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_gets_nothing_even_if_he_can_connect() -> None:
    root = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        root.chmod(0o711)
        with led(root):
            (path,) = root.glob("*.sock")
            path.chmod(0o666)
            command = [sys.executable, "-c", OTHER_USER, str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            assert "the peer is another user" in json.loads(done.stdout)["error"]
            attach(str(root), "engine").close()
    finally:
        shutil.rmtree(root)


WITHOUT_DESCRIPTORS = """
import logging, os, resource, socket, sys, threading
from pathlib import Path
from flexkv.host.arena import ArenaSpec
from flexkv.session import Shard, lead

seen = threading.Event()
class Seen(logging.Handler):
    def emit(self, record):
        assert "cannot accept a process ([Errno 24]" in record.getMessage(), record.getMessage()
        seen.set()
logging.getLogger("flexkv").addHandler(Seen())

session = lead(sys.argv[1], "engine", Shard(0, "same", 2, 8192), 1,
               lambda fmt, promised: ArenaSpec(fmt, 4), threads=1)
(path,) = Path(sys.argv[1]).glob("*.sock")
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
os.chdir(path.parent)  # the whole path may be too long for an address
peer.connect(path.name)
assert seen.wait(60)
for fd in taken:
    os.close(fd)
peer.sendall(b'{"scheduler": 1}')
print(peer.recv(65536).decode())
session.close()
"""


def test_a_process_without_descriptors_accepts_again_when_it_has_some(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["session"]["fingerprint"] == "same"


def test_an_odd_error_at_a_process_refuses_that_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with led(tmp_path):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", without_memory)
            with connected(tmp_path) as peer:
                peer.settimeout(60)
                assert peer.recv(65536) == b""
        attach(str(tmp_path), "engine").close()


def without_memory(_: threading.Thread) -> None:
    raise MemoryError
