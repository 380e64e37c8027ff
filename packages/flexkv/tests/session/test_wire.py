# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from no_files import no_more_files
from sessions import plan

from flexkv.layout import BlockFormat
from flexkv.session import SessionInfo, Shard, wire


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX)
    with left, right:
        yield left, right


def test_a_message_longer_than_one_read_arrives_with_its_descriptor(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    message: dict[str, object] = {"sizes": list(range(20_000))}
    with (tmp_path / "file").open("w+") as file:
        wire.send(ends[0], message, file.fileno())
        received, fd = wire.receive(ends[1])
        assert received == message
        assert fd is not None
        assert os.path.samestat(os.fstat(fd), os.fstat(file.fileno()))
        assert not os.get_inheritable(fd)
        os.close(fd)


@pytest.mark.parametrize("line", [b"[]\n", b"no json\n", b"[" * 100_000 + b"\n", b'{"a":'])
def test_a_malformed_message_leaves_no_descriptor_open(
    ends: tuple[socket.socket, socket.socket], line: bytes, tmp_path: Path
) -> None:
    with (tmp_path / "file").open("w+") as file:
        socket.send_fds(ends[0], [line], [file.fileno()])
        ends[0].shutdown(socket.SHUT_WR)
        with pytest.raises(ValueError, match=r"mapping|Expecting|nested"):
            wire.receive(ends[1])
        assert descriptors_of(file) == [file.fileno()]


def test_a_descriptor_without_room_for_files_is_an_error_of_its_own(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    wire.send(ends[0], {}, ends[0].fileno())
    with no_more_files(), pytest.raises(OSError, match="Too many open files"):
        wire.receive(ends[1])


def test_a_message_with_two_descriptors_is_refused(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    with (tmp_path / "file").open("w+") as file:
        socket.send_fds(ends[0], [b"{}\n"], [file.fileno()] * 2)
        with pytest.raises(ValueError, match="more than one descriptor"):
            wire.receive(ends[1])
        assert descriptors_of(file) == [file.fileno()]


def descriptors_of(file: IO[str]) -> list[int]:
    """This process's descriptors of a file. Threads that other tests left may have other files."""
    found = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            if os.path.samestat(os.fstat(descriptor), os.fstat(file.fileno())):
                found.append(descriptor)
    return found


def test_a_peer_that_leaves_without_a_word_sent_nothing(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ends[0].close()
    assert wire.receive(ends[1]) == (None, None)


def test_the_kernel_knows_who_the_peer_is(ends: tuple[socket.socket, socket.socket]) -> None:
    assert wire.peer_of(ends[0]) == (os.getpid(), os.geteuid())


def test_descriptions_survive_the_wire(ends: tuple[socket.socket, socket.socket]) -> None:
    info = SessionInfo(
        "f", plan(BlockFormat(2, (5000, 8192), 2)), durable=False, identity=("a: b",)
    )
    wire.send(ends[0], info.to_json())
    message, _ = wire.receive(ends[1])
    assert message is not None
    assert SessionInfo.from_json(message) == info
    shard = {"rank": 3, "fingerprint": "f", "engine_blocks": 2, "shard_bytes": 4096, "replicas": 2}
    shard |= {"stage": 1, "identity": ["a: b", "c: d"]}
    given = Shard.from_json(shard | {"numa_node": 1, "durable": False})
    assert given == Shard(3, "f", 2, 4096, 2, 1, durable=False, stage=1, identity=("a: b", "c: d"))
    with pytest.raises(ValueError, match="-1 is not a whole number"):
        Shard.from_json(shard | {"numa_node": -1, "durable": False})
