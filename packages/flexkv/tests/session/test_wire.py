# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import msgspec
import pytest
from no_files import no_more_files
from sessions import plan

from flexkv.layout import BlockFormat
from flexkv.session import SessionInfo, Shard, wire
from flexkv.session.wire import ServiceTicket

ERROR = wire.Answer(error="x" * 130_000)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        yield left, right


def test_a_long_message_arrives_with_its_descriptor(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    with (tmp_path / "file").open("w+") as file:
        wire.send(ends[0], ERROR, file.fileno())
        received, fd = wire.receive(ends[1], wire.Answer)
        assert received == ERROR
        assert fd is not None
        assert os.path.samestat(os.fstat(fd), os.fstat(file.fileno()))
        assert not os.get_inheritable(fd)
        os.close(fd)


@pytest.mark.parametrize(
    ("packet", "said"),
    [
        (b"[]", "Expected `object`"),
        (b"no json", "malformed"),
        (b"[" * 60_000, "Expected `object`"),
        (b'{"session":{"x":' + b"[" * 60_000, "recursion depth"),
        (b'{"error":', "truncated"),
        (b'{"other":1}', "unknown field"),
        (b"x" * 140_000, "more than 131072 bytes or 1 descriptors"),
    ],
)
def test_a_malformed_message_leaves_no_descriptor_open(
    ends: tuple[socket.socket, socket.socket], packet: bytes, said: str, tmp_path: Path
) -> None:
    with (tmp_path / "file").open("w+") as file:
        socket.send_fds(ends[0], [packet], [file.fileno()])
        with pytest.raises(ValueError, match=said):
            wire.receive(ends[1], wire.Answer)
        assert descriptors_of(file) == [file.fileno()]


def test_a_descriptor_without_room_for_files_is_an_error_of_its_own(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    wire.send(ends[0], ERROR, ends[0].fileno())
    with no_more_files(), pytest.raises(OSError, match="Too many open files"):
        wire.receive(ends[1], wire.Answer)


@pytest.mark.parametrize("count", [2, 3])
def test_a_message_with_more_than_one_descriptor_is_refused(
    ends: tuple[socket.socket, socket.socket], count: int, tmp_path: Path
) -> None:
    with (tmp_path / "file").open("w+") as file:
        socket.send_fds(ends[0], [b"{}"], [file.fileno()] * count)
        with pytest.raises(ValueError, match="or 1 descriptors"):
            wire.receive(ends[1], wire.Answer)
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
    assert wire.receive(ends[1], wire.Greeting) == (None, None)


def test_the_kernel_knows_who_the_peer_is(ends: tuple[socket.socket, socket.socket]) -> None:
    assert wire.peer_of(ends[0]) == (os.getpid(), os.geteuid())


def test_descriptions_survive_the_wire(ends: tuple[socket.socket, socket.socket]) -> None:
    ticket = ServiceTicket("/run", 3, "00ff", "engine", "model")
    spec = plan(BlockFormat(2, (5000, 8192), 2))
    for info in (
        SessionInfo("f", spec, durable=False, identity=("a: b",)),
        SessionInfo("f", replace(spec, boards=4, board=3), service=ticket),
    ):
        wire.send(ends[0], wire.Answer(info))
        assert wire.receive(ends[1], wire.Answer) == (wire.Answer(info), None)
    given = Shard(3, "f", 2, 4096, 2, 1, durable=False, stage=1, identity=("a: b", "c: d"))
    wire.send(ends[0], wire.Greeting(rank=given))
    assert wire.receive(ends[1], wire.Greeting) == (wire.Greeting(rank=given), None)


@pytest.mark.parametrize(
    ("field", "value"),
    [("numa_node", "-1"), ("rank", "true"), ("shard_bytes", "-4096"), ("identity", '"text"')],
)
def test_a_shard_that_cannot_be_is_refused(
    ends: tuple[socket.socket, socket.socket], field: str, value: str
) -> None:
    good = {"rank": "1", "fingerprint": '"f"', "engine_blocks": "2", "shard_bytes": "4096"}
    for fields in (good, good | {field: value}):
        shard = ",".join(f'"{name}":{text}' for name, text in fields.items())
        ends[0].send(f'{{"rank":{{{shard}}}}}'.encode())
    assert wire.receive(ends[1], wire.Greeting)[0] == wire.Greeting(rank=Shard(1, "f", 2, 4096))
    with pytest.raises(ValueError, match="Expected"):
        wire.receive(ends[1], wire.Greeting)


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [('"boards":1', '"boards":-1'), ('"board":0', '"board":1'), ('_slots":4', '_slots":-4')],
)
def test_an_arena_that_cannot_be_is_refused(
    ends: tuple[socket.socket, socket.socket], spec: str, wrong: str
) -> None:
    text = msgspec.json.encode(wire.Answer(SessionInfo("f", plan(BlockFormat(1, (4096,))))))
    assert spec.encode() in text
    ends[0].send(text.replace(spec.encode(), wrong.encode()))
    with pytest.raises(ValueError, match="is no arena"):
        wire.receive(ends[1], wire.Answer)
