# SPDX-License-Identifier: Apache-2.0
"""The messages of a session: one packet of JSON each way, on a SOCK_SEQPACKET socket. Rank 0's
packet carries the arena's descriptor."""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, TypeAlias, TypeVar

import msgspec

from flexkv.host.arena import ArenaSpec

_MAX_PACKET = 1 << 17
"""Bytes of a packet. By default a socket's buffer takes 208 KiB."""

_CREDENTIALS = struct.Struct("iII")
"""Process, user and group of a peer (unix(7), SO_PEERCRED)."""

_Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of each block that one rank holds, as the rank describes it to rank 0.

    All ranks have the same `kind`, and those of a stage the same fingerprint.

    Attributes:
        fingerprint: see `flexkv.layout.fingerprint`.
        engine_blocks: engine blocks per FlexKV block.
        shard_bytes: bytes of the rank's part of one block.
        replicas: how many ranks in a row hold the same part.
        numa_node: of the rank's GPU; None if there is no GPU or its node is unknown.
        durable: whether equal keys mean equal blocks in the next process too.
        stage: of the pipeline; the ranks of a stage have consecutive numbers.
        identity: the parts of the fingerprint, for people to read.
    """

    rank: _Whole
    fingerprint: str
    engine_blocks: _Whole
    shard_bytes: _Whole
    replicas: _Whole = 1
    numa_node: _Whole | None = None
    durable: bool = True
    stage: _Whole = 0
    identity: tuple[str, ...] = field(default=(), repr=False)

    @property
    def kind(self) -> tuple[int, int, bool]:
        """The fields that must be the same in all ranks."""
        return self.engine_blocks, self.replicas, self.durable


class ServiceTicket(NamedTuple):
    """The proof of an engine's processes that the node's service has given it an arena: the
    service's runtime directory and its number of the engine, a secret in hex, the engine's id for
    logs, and the name by which the engine serves its model."""

    root: str
    client: _Whole
    token: str
    engine: str
    model: str


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """The description of a session that rank 0 sends to all processes. `fingerprint` is that of the
    blocks of all stages; `service` is None if the arena is the engine's own."""

    fingerprint: str
    spec: ArenaSpec
    durable: bool = True
    identity: tuple[str, ...] = ()
    service: ServiceTicket | None = field(default=None, repr=False)


class Greeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A process asks for the arena: a rank with its shard, or the scheduler with its process id."""

    rank: Shard | None = None
    scheduler: _Whole | None = None


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rank 0's answer: the session, whose packet has the arena's descriptor, or an error."""

    session: SessionInfo | None = None
    error: str = ""


class Peer(NamedTuple):
    """The process id and user of the other end of a connection, from the kernel."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """The process that connected, or that listened when this end connected."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return Peer(pid, uid)


def send(connection: socket.socket, message: Greeting | Answer, fd: int | None = None) -> None:
    """Send a message, and a copy of a descriptor if one is given. Raises OSError."""
    fds = [] if fd is None else [fd]
    socket.send_fds(connection, [msgspec.json.encode(message)], fds)


_Message = TypeVar("_Message", Greeting, Answer)


def receive(connection: socket.socket, kind: type[_Message]) -> tuple[_Message | None, int | None]:
    """Receive a message: None if the peer closed the connection and sent nothing; and the
    descriptor in it, which the caller closes, or None. Raises OSError as `receive_packet` does, and
    ValueError if the peer sent no message of this kind."""
    packet, fds = receive_packet(connection, _MAX_PACKET, 1)
    try:
        message = msgspec.json.decode(packet, type=kind) if packet else None
    except (ValueError, RecursionError) as error:
        for fd in fds:
            os.close(fd)
        raise ValueError(str(error)) from None
    return message, fds[0] if fds else None


def receive_packet(connection: socket.socket, size: int, most_fds: int) -> tuple[bytes, list[int]]:
    """One packet, and the descriptors in it, which the caller closes. They close on exec. The
    packet is empty at the end of the connection. Raises OSError if the connection broke, timed out,
    or has no packet now, or this process has too many open files; ValueError if the packet has more
    than `size` bytes or `most_fds` descriptors."""
    fds = array.array("i")
    room = socket.CMSG_SPACE(most_fds * fds.itemsize)
    packet, ancillary, said, _ = connection.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if len(fds) > most_fds or said & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        if not said & socket.MSG_TRUNC and len(fds) < most_fds:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise ValueError(f"a packet has more than {size} bytes or {most_fds} descriptors")
    return packet, fds.tolist()
