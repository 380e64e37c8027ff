# SPDX-License-Identifier: Apache-2.0
"""The messages between engines and the service: packets of msgpack on a SOCK_SEQPACKET socket.

A packet is a list of messages. Nobody waits for an answer: the engine's scheduler goes on with what
it knows. The first packet of each side is a greeting, and the service's has descriptors of memory.
"""

from __future__ import annotations

import errno
import functools
import operator
import os
import signal
import socket
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from flexkv.client import MOST_PRIORITY, Hold
from flexkv.eviction import RequestContext
from flexkv.session.wire import peer_of, receive_packet
from flexkv.tiers.base import MAX_KEY_BYTES
from flexkv.types.changes import Medium
from flexkv.types.tenants import LARGEST_TENANT, NO_TENANT

PROTOCOL = 8
"""Both sides must have the same, and the same layout of `page`."""

SOCKET = "flexkv service"
"""The name of the service in its runtime directory."""

ENGINES = "engines"
"""The file in the directory by which a service sees that engines of the one before it live."""

MAX_PACKET = 1 << 16
"""Bytes of a packet: a fraction of what a socket's buffer takes by default, 208 KiB."""

_FULL = MAX_PACKET - (1 << 13)
"""Bytes after which a packet takes no further message. What a message names at most, `MOST_KEYS` of
96 bytes, fits into the rest of an empty packet."""

MOST_NAME = 256
"""Characters of the name of a model."""

MOST_KEYS = 512
"""Keys in one message."""

DESCRIBED_BYTES = 1 << 15
"""Keys and descriptions in one message; together with another of this size they fit into a
packet. A longer description is not sent."""


TenantNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=NO_TENANT, le=LARGEST_TENANT)]
"""See `flexkv.types.tenants`."""


RequestPriority: TypeAlias = Annotated[int, msgspec.Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)]
"""See `CacheClient.fetch`."""


class _Array(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    pass


class ToService(_Array, frozen=True, tag=True):
    """A message of an engine: an array, whose first item is the name of its class."""


class ToEngine(_Array, frozen=True, tag=True):
    """A message of the service."""


# From an engine.


class PoolBlocks(_Array, frozen=True):
    """The blocks of an engine: engines with equal ones share a pool. `identity` has the parts of
    the fingerprint, for people to read; for the sizes see `BlockFormat`."""

    fingerprint: str
    engine_blocks: int
    shard_bytes: tuple[int, ...]
    replicas: int
    identity: tuple[str, ...]


class Ticket(_Array, frozen=True):
    """What the processes of an engine show to the service: the engine's number, and proof that the
    service gave it out."""

    client: int
    token: bytes


class Open(ToService, frozen=True):
    """The first rank of an engine asks for a pool. Its packet has a pidfd of the process. `engine`
    is the engine's id, for logs; `model` the name by which it serves its model."""

    protocol: int
    engine: str
    model: str
    blocks: PoolBlocks


class Join(ToService, frozen=True):
    """Another process of the engine maps the memory. Its packet has a pidfd of the process."""

    protocol: int
    ticket: Ticket


class Schedule(ToService, frozen=True):
    """The scheduler of the engine begins. Its packet has a pidfd of the process. The engine can
    fill `step_blocks` blocks before its first stores are published. `tenant` is the number of the
    tenant of all its requests; `NO_TENANT` if it has none of its own."""

    protocol: int
    ticket: Ticket
    step_blocks: int
    tenant: TenantNumber


class Resume(ToService, frozen=True):
    """The scheduler of an engine goes on after its connection has ended, at the same service or at
    the next one. Its packet has descriptors: a pidfd of the process, the arena, the memory of the
    index, and that of the holds. For the fields see `Open` and `Schedule`; `slots` are those of the
    arena."""

    protocol: int
    ticket: Ticket
    engine: str
    model: str
    blocks: PoolBlocks
    slots: int
    step_blocks: int
    tenant: TenantNumber


class Claim(ToService, frozen=True):
    """Follows `Resume`: slots that were granted to the engine and may be written to. The last
    message of these says so."""

    slots: list[int]
    last: bool


class Announce(ToService, frozen=True):
    """Blocks that the engine is storing, beside others: those of prompts. Another engine waits for
    them. The announcement ends with the last `Publish` of the store, or with `Retract`. `RecordUse`
    announces what a request computes of its prompt, until `Publish` or `RequestEnded`. `cell` is
    the store's cell of the board."""

    cell: int
    keys: list[bytes]


class Retract(ToService, frozen=True):
    """The store of this cell publishes nothing, or without a cell: what requests compute now is not
    stored, for want of slots. Nothing may be announced."""

    cell: int | None


class Publish(ToService, frozen=True):
    """Blocks of a store whose ranks have all reported DONE; `last` ends the store. `before` has for
    each block the key of the block before it: empty if that is the one before it in `keys`, None
    for the first of a prefix. `tenants` is empty for the engine's own."""

    cell: int
    keys: list[bytes]
    before: list[bytes | None]
    slots: list[int]
    tenants: list[TenantNumber]
    last: bool


class Return(ToService, frozen=True):
    """Granted slots to which no rank writes any more."""

    slots: list[int]


class RecordUse(ToService, frozen=True):
    """See `CacheClient.record`. The first `found` keys of the prompt were found, of `others` if
    that is not empty. Long prompts take several messages, of which the last has the context."""

    prompt: list[bytes]
    found: int
    others: list[bytes]
    context: RequestContext | None


class Touch(ToService, frozen=True):
    """See `CacheClient.touch`."""

    keys: list[bytes]


class RequestEnded(ToService, frozen=True):
    """See `CacheClient.ended`."""

    request_id: str
    output_tokens: int


class HoldBlocks(ToService, frozen=True):
    """See `CacheClient.hold`."""

    kind: Hold
    keys: list[bytes]
    owner: str
    seconds: float | None


class UnholdBlocks(ToService, frozen=True):
    """See `CacheClient.unhold`."""

    kind: Hold
    owner: str
    keys: list[bytes]


class Demote(ToService, frozen=True):
    """See `CacheClient.demote`."""

    keys: list[bytes]


class Fetch(ToService, frozen=True):
    """See `CacheClient.fetch`. Further keys follow with `ExtendFetch`."""

    fetch: int
    keys: list[bytes]
    queued: bool
    tenant: TenantNumber | None
    announced: int
    priority: RequestPriority


class ExtendFetch(ToService, frozen=True):
    """See `CacheClient.extend_fetch`."""

    fetch: int
    keys: list[bytes]
    raise_priority: bool


class EndFetch(ToService, frozen=True):
    """See `CacheClient.end_fetch`."""

    fetch: int


class Query(ToService, frozen=True):
    """See `CacheClient.query`. The service answers within the deadlines of its stores."""

    keys: list[bytes]
    scattered: list[bytes]


class Watch(ToService, frozen=True):
    """The engine wants to know of all blocks, and of changes from now on."""

    number: int


class Describe(ToService, frozen=True):
    """See `CacheClient.describe`. The engine is about to store these blocks, or has found them."""

    keys: list[bytes]
    texts: list[bytes]


# From the service.


class Opened(ToEngine, frozen=True):
    """The answer to `Open`, with a descriptor of the arena."""

    ticket: Ticket
    slots: int
    boards: int


class Joined(ToEngine, frozen=True):
    """The answer to `Join`."""


class Scheduled(ToEngine, frozen=True):
    """The answer to `Schedule`, with descriptors of the memory of the index, of the holds, of what
    disks have and of what engines are storing (`pool_keys`). `media` has the lower tiers, the
    fastest first; `asks_stores` says whether one has to be asked what it has, and `has_shares`
    whether tenants have shares of the memory."""

    media: tuple[Medium, ...]
    asks_stores: bool
    policy: str
    has_shares: bool


class Resumed(ToEngine, frozen=True):
    """The answer to `Resume`, with the last two descriptors of `Scheduled`."""

    has_shares: bool


class Refused(ToEngine, frozen=True):
    """The answer to any greeting, in one sentence."""

    reason: str


class Granted(ToEngine, frozen=True):
    """Slots that the engine may write to."""

    slots: list[int]


class Recall(ToEngine, frozen=True):
    """The engine should return as many granted slots, or those that it has."""

    count: int


class Changed(ToEngine, frozen=True):
    """See `Changes`. `texts` has the description of each block that came, empty if there is none;
    or it is empty for no descriptions at all."""

    medium: Medium
    removed: list[bytes]
    added: list[bytes]
    texts: list[bytes]


class Repeated(ToEngine, frozen=True):
    """The engine has been told of all blocks that were there at the `Watch` of this number."""

    number: int


class Answered(ToEngine, frozen=True):
    """Which blocks of queries a tier has, and which none has."""

    there: list[bytes]
    absent: list[bytes]


class NodeFigures(ToEngine, frozen=True):
    """What all engines of a pool have in common: values of host memory and lower tiers, and whether
    a clear of the pool has failed."""

    shared: dict[str, float]
    is_suspended: bool


_encoder = msgspec.msgpack.Encoder()

Item = TypeVar("Item")
Kind = TypeVar("Kind", ToService, ToEngine)


class WireError(Exception):
    """The peer sent something that is no packet of this protocol."""


def parts(items: Sequence[Item], most: int = MOST_KEYS) -> Iterator[list[Item]]:
    """The items, as many as fit into a message at a time."""
    return (list(items[start : start + most]) for start in range(0, len(items), most))


def described_parts(described: Mapping[bytes, bytes]) -> Iterator[dict[bytes, bytes]]:
    """Blocks and their descriptions in as many parts as they need messages, in order."""
    part: dict[bytes, bytes] = {}
    size = 0
    for key, text in described.items():
        sent = text if len(text) + MAX_KEY_BYTES < DESCRIBED_BYTES else b""
        taken = len(key) + len(sent) + 2 * HEAD
        if part and (len(part) == MOST_KEYS or size + taken > DESCRIBED_BYTES):
            yield part
            part, size = {}, 0
        part[key] = sent
        size += taken
    if part:
        yield part


def packets(messages: Sequence[ToService] | Sequence[ToEngine]) -> list[bytes]:
    """The messages in as few packets as hold them, in order. Raises WireError if a message is
    larger than a packet."""
    made: list[list[bytes]] = []
    size = MAX_PACKET
    for message in messages:
        encoded = _encoder.encode(message)
        if len(encoded) > MAX_PACKET - HEAD:
            raise WireError(f"a message has {len(encoded)} bytes; allowed: {MAX_PACKET - HEAD}")
        if size + len(encoded) > _FULL:
            made.append([])
            size = HEAD
        made[-1].append(encoded)
        size += len(encoded)
    return [_array(parts) for parts in made]


HEAD = 5
"""Bytes of an array's beginning in msgpack, at most."""


def _array(parts: Sequence[bytes]) -> bytes:
    return b"\xdd" + len(parts).to_bytes(4, "big") + b"".join(parts)


def _reader(kind: type[Kind], sender: str) -> Callable[[bytes | memoryview], list[Kind]]:
    any_of = functools.reduce(operator.or_, kind.__subclasses__())
    decoder: msgspec.msgpack.Decoder[list[Kind]]
    decoder = msgspec.msgpack.Decoder(types.GenericAlias(list, (any_of,)))

    def read(packet: bytes | memoryview) -> list[Kind]:
        try:
            return decoder.decode(packet)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireError(f"{len(packet)} bytes are no messages of {sender}: {error}") from None

    return read


read_service = _reader(ToService, "an engine")
read_engine = _reader(ToEngine, "the service")
"""Read the messages of a packet. Raise WireError if it is none."""


def receive(connection: socket.socket, room: bytearray) -> memoryview:
    """One packet of a peer that has greeted, without its descriptors, which the kernel drops. The
    packet is empty at the end of the connection. It lies in `room`, of `MAX_PACKET` bytes, until
    that is used again.

    Raises OSError if the connection broke, or has no packet now; WireError if the packet is too
    large.
    """
    size = connection.recv_into(room, 0, socket.MSG_TRUNC)
    if size > len(room):
        raise WireError(f"a packet has {size} bytes; allowed: {len(room)}")
    return memoryview(room)[:size]


def receive_greeting(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One packet, and the descriptors in it, which the caller closes. The packet is empty at the
    end of the connection.

    Raises OSError if the connection broke, timed out, or has no packet now, or if this process has
    too many open files to take the descriptors; WireError if the packet is too large, or has too
    many descriptors.
    """
    try:
        return receive_packet(connection, MAX_PACKET, _MOST_FDS)
    except ValueError as error:
        raise WireError(str(error)) from None


_MOST_FDS = 4


def own_process() -> int:
    """A pidfd of this process, by which the peer notices its end. Process ids mean nothing in other
    containers. The caller closes it. Raises OSError if the kernel is older than 5.3."""
    return os.pidfd_open(os.getpid())


def is_process(fd: int) -> bool:
    """Whether a descriptor is a pidfd. Its process may have ended."""
    try:
        signal.pidfd_send_signal(fd, 0)
    except OSError as error:
        return error.errno != errno.EBADF  # the process may be in another container
    return True


def is_same_user(connection: socket.socket) -> bool:
    """Whether the peer is a process of this user."""
    return peer_of(connection).uid == os.geteuid()
