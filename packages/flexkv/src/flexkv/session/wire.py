# SPDX-License-Identifier: Apache-2.0
"""The messages of a session: one line of JSON each way. Rank 0's message carries the arena's
descriptor."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from flexkv.host.arena import ArenaSpec
from flexkv.layout import BlockFormat

_MAX_MESSAGE = 1 << 20
_CHUNK = 1 << 16
_CREDENTIALS = struct.Struct("iII")
"""Process, user and group of a peer (unix(7), SO_PEERCRED)."""

_DESCRIPTOR = struct.Struct("i")


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of each block that one rank holds, as the rank describes it to rank 0.

    Attributes:
        rank: number of the rank, from 0.
        fingerprint: see `flexkv.layout.fingerprint`; must be the same in all ranks of a stage.
        engine_blocks: engine blocks per FlexKV block; must be the same in all ranks.
        shard_bytes: bytes of the rank's part of one block.
        replicas: how many ranks in a row hold the same part; must be the same in all ranks.
        numa_node: NUMA node of the rank's GPU; None if there is no GPU or its node is unknown.
        durable: whether equal keys mean equal blocks in the next process too; must be the same in
            all ranks.
        stage: stage of the pipeline; the ranks of a stage have consecutive numbers.
        identity: the parts of the fingerprint, for people to read.
    """

    rank: int
    fingerprint: str
    engine_blocks: int
    shard_bytes: int
    replicas: int = 1
    numa_node: int | None = None
    durable: bool = True
    stage: int = 0
    identity: tuple[str, ...] = field(default=(), repr=False)

    @property
    def kind(self) -> tuple[int, int, bool]:
        """The fields that must be the same in all ranks."""
        return self.engine_blocks, self.replicas, self.durable

    @classmethod
    def from_json(cls, fields: object) -> Shard:
        """Read the shard in a rank's message.

        Raises:
            ValueError, KeyError: `fields` describes no shard.
        """
        if not isinstance(fields, dict):
            raise ValueError("rank is not a mapping")
        node = fields["numa_node"]
        return cls(
            _as_int(fields["rank"]),
            str(fields["fingerprint"]),
            _as_int(fields["engine_blocks"]),
            _as_int(fields["shard_bytes"]),
            _as_int(fields["replicas"]),
            None if node is None else _as_int(node),
            fields["durable"] is True,
            _as_int(fields["stage"]),
            _as_texts(fields["identity"]),
        )


class ServiceTicket(NamedTuple):
    """The proof of an engine's processes that the node's service has given it an arena.

    Attributes:
        root: the service's runtime directory.
        client: the service's number of the engine.
        token: secret of the engine, in hex.
        engine: the engine's id, for logs.
        model: the name by which the engine serves its model.
    """

    root: str
    client: int
    token: str
    engine: str
    model: str


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """The description of a session that rank 0 sends to all processes.

    Attributes:
        fingerprint: fingerprint of the blocks of all stages.
        spec: sizes of the arena.
        durable: see `Shard`.
        identity: the parts of the fingerprint, for people to read.
        service: what the node's service knows the engine by; None if the arena is the engine's own.
    """

    fingerprint: str
    spec: ArenaSpec
    durable: bool = True
    identity: tuple[str, ...] = ()
    service: ServiceTicket | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, object]:
        """The fields as values of JSON, for a message."""
        fmt = self.spec.format
        return {
            "fingerprint": self.fingerprint,
            "engine_blocks": fmt.engine_blocks,
            "shard_bytes": list(fmt.shard_bytes),
            "replicas": fmt.replicas,
            "num_slots": self.spec.num_slots,
            "boards": self.spec.boards,
            "board": self.spec.board,
            "durable": self.durable,
            "identity": list(self.identity),
            "service": None if self.service is None else list(self.service),
        }

    @classmethod
    def from_json(cls, message: Mapping[str, object]) -> SessionInfo:
        """Read the description in rank 0's message.

        Raises:
            ValueError, KeyError: `message` describes no arena.
        """
        sizes = message["shard_bytes"]
        if not isinstance(sizes, list):
            raise ValueError("shard_bytes is not a list")
        fmt = BlockFormat(
            _as_int(message["engine_blocks"]),
            tuple(_as_int(s) for s in sizes),
            _as_int(message["replicas"]),
        )
        boards, board = _as_int(message["boards"]), _as_int(message["board"])
        if board >= boards:
            raise ValueError(f"{board} is not one of {boards} boards")
        spec = ArenaSpec(fmt, _as_int(message["num_slots"]), boards, board)
        identity = _as_texts(message["identity"])
        service = None
        if message["service"] is not None:
            root, client, token, *names = _as_list(message["service"])
            engine, model = map(str, names)
            service = ServiceTicket(str(root), _as_int(client), str(token), engine, model)
        durable = message["durable"] is True
        return cls(str(message["fingerprint"]), spec, durable, identity, service)


class Peer(NamedTuple):
    """The process id and user of the other end of a connection, from the kernel."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """The process that connected, or that listened when this end connected."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return Peer(pid, uid)


def send(connection: socket.socket, message: Mapping[str, object], fd: int | None = None) -> None:
    """Send a message.

    Args:
        connection: the connection.
        message: the message; JSON must be able to hold it.
        fd: a descriptor of which the peer gets a copy; None for none. The caller keeps it.

    Raises:
        OSError: the connection broke or timed out.
    """
    line = json.dumps(message).encode() + b"\n"
    rest = line[socket.send_fds(connection, [line], [] if fd is None else [fd]) :]
    if rest:  # a peer that has the whole message may have closed the connection already
        connection.sendall(rest)


def receive(connection: socket.socket) -> tuple[dict[str, object] | None, int | None]:
    """Receive a message.

    Returns:
        The message, or None if the peer closed the connection and sent nothing; and the descriptor
        in it, which the caller closes, or None.

    Raises:
        OSError: the connection broke or timed out, or this process has too many open files.
        ValueError: the peer sent no message of a session.
    """
    line, fd = _receive_some(connection)
    try:
        if not line:
            return None, None
        while not line.endswith(b"\n") and len(line) < _MAX_MESSAGE:
            more = connection.recv(_CHUNK)
            if not more:
                break
            line += more
        message = _parse(line)
    except (OSError, ValueError):
        if fd is not None:
            os.close(fd)
        raise
    return message, fd


def _receive_some(connection: socket.socket) -> tuple[bytes, int | None]:
    """Receive the beginning of a message and the descriptor in it. The descriptor closes on exec,
    which `socket.recv_fds` would not arrange."""
    room, flags = socket.CMSG_LEN(_DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
    line, ancillary, said, _ = connection.recvmsg(_CHUNK, room, flags)
    fds = [
        fd
        for level, kind, data in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (fd,) in _DESCRIPTOR.iter_unpack(data)
    ]
    if said & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        if not fds:  # this process has no room for it
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise ValueError("message has more than one descriptor")
    return line, fds[0] if fds else None


def _parse(line: bytes) -> dict[str, object]:
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("message is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("message is not a mapping")
    return message


def _as_texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, _as_list(value)))


def _as_list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list")
    return value


def _as_int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value
