# SPDX-License-Identifier: Apache-2.0
"""How the processes of one engine meet and share an arena.

Rank 0 leads: it listens on a unix socket that bears the engine's id, hears from every other rank
how large its shard of a block is, creates the arena and hands it out as a file descriptor, to the
ranks and to the engine's scheduler. The socket is also the proof of ownership: a second engine of
the same id finds it answering and stops. A socket that nobody answers was left by a killed
engine, and the next start removes it.

Messages are one line of JSON each way.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from flexkv.arena import Arena, ArenaSpec
from flexkv.errors import ArenaError, FlexKVError
from flexkv.layout import BlockFormat

logger = logging.getLogger(__name__)

MEET_SECONDS = 120.0
"""How long processes wait for one another. Ranks register their caches at the same moment, but
rank 0 then fills the arena: about 5 s per 100 GiB with 4 threads."""

_GREETING_SECONDS = 5.0
"""A peer sends its greeting at once; one that does not must not keep the others out."""

_MAX_MESSAGE = 1 << 20
_RETRY_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank brings to the session.

    Attributes:
        rank: its number, from 0.
        fingerprint: see `flexkv.layout.fingerprint`; must be the same in all ranks.
        engine_blocks: engine blocks per FlexKV block; must be the same in all ranks.
        shard_bytes: bytes of the rank's part of one block.
        replicas: how many ranks in a row hold the same part; must be the same in all ranks.
        numa_node: of the rank's GPU; None if there is none or it is not known.
        durable: whether equal keys mean equal blocks in the next process, too; must be the same in
            all ranks.
    """

    rank: int
    fingerprint: str
    engine_blocks: int
    shard_bytes: int
    replicas: int = 1
    numa_node: int | None = None
    durable: bool = True

    @property
    def kind(self) -> tuple[str, int, int, bool]:
        """What must be the same in all ranks."""
        return self.fingerprint, self.engine_blocks, self.replicas, self.durable


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What every process knows once the arena is there."""

    fingerprint: str
    spec: ArenaSpec
    durable: bool = True

    def to_json(self) -> dict[str, object]:
        fmt = self.spec.format
        return {
            "fingerprint": self.fingerprint,
            "engine_blocks": fmt.engine_blocks,
            "shard_bytes": list(fmt.shard_bytes),
            "replicas": fmt.replicas,
            "num_slots": self.spec.num_slots,
            "durable": self.durable,
        }

    @classmethod
    def from_json(cls, message: dict[str, object]) -> SessionInfo:
        sizes = message["shard_bytes"]
        if not isinstance(sizes, list):
            raise ValueError("shard_bytes is not a list")
        fmt = BlockFormat(
            _as_int(message["engine_blocks"]),
            tuple(_as_int(s) for s in sizes),
            _as_int(message["replicas"]),
        )
        spec = ArenaSpec(fmt, _as_int(message["num_slots"]))
        return cls(str(message["fingerprint"]), spec, message["durable"] is True)


@dataclass(slots=True)
class Session:
    """A process's place in a session: the arena, and in rank 0 the socket that hands it out.

    `close` unmaps the arena and, in rank 0, gives up the engine's id.
    """

    info: SessionInfo
    arena: Arena
    _server: _Server | None = field(default=None, repr=False)

    def close(self) -> None:
        """Leave the session. Idempotent. No copy may be under way in this process."""
        if self._server is not None:
            self._server.close()
        self.arena.close()


def lead(
    root: str,
    name: str,
    mine: Shard,
    ranks: int,
    plan: Callable[[BlockFormat], ArenaSpec],
    *,
    threads: int,
) -> Session:
    """Open the session `name` as rank 0 and wait until every rank has joined.

    Args:
        root: directory of the sockets; created 0700 if missing.
        name: the engine's id.
        mine: rank 0's shard.
        ranks: ranks of the engine, this one included.
        plan: sizes the arena once the shards are known; may raise.
        threads: threads that fill the arena.

    Raises:
        ArenaError: the directory cannot be used, a living engine owns `name`, a rank did not
            join in time or disagrees, or the memory is not there. The other ranks get it too.
    """
    server = _Server(*_own_socket(pathlib.Path(root), name), name)
    try:
        shards = server.gather(mine, ranks)
        parts = tuple(shard.shard_bytes for shard in shards[:: mine.replicas])
        block_format = BlockFormat(mine.engine_blocks, parts, mine.replicas)
        nodes = frozenset(s.numa_node for s in shards if s.numa_node is not None)
        arena = Arena.create(plan(block_format), threads, nodes)
    except FlexKVError as error:
        server.refuse(str(error))
        server.close()
        raise
    info = SessionInfo(mine.fingerprint, arena.spec, mine.durable)
    server.hand_out(info, arena.fd)
    return Session(info, arena, server)


def join(root: str, name: str, mine: Shard) -> Session:
    """Join the session `name` as another rank, once rank 0 has opened it.

    Raises:
        ArenaError: rank 0 did not open it in time, refused, or could not make the arena.
    """
    return _connect(pathlib.Path(root), name, {"rank": asdict(mine)})


def attach(root: str, name: str) -> Session:
    """Attach to the complete session `name` as the engine's scheduler.

    Raises:
        ArenaError: there is no such session, or it refused.
    """
    return _connect(pathlib.Path(root), name, {"scheduler": os.getpid()})


class _Server:
    """Rank 0's end. One daemon thread accepts; all state is under one lock."""

    def __init__(self, listener: socket.socket, path: pathlib.Path, name: str) -> None:
        self._listener = listener
        self._path = path
        self._name = name
        self._changed = threading.Condition()
        self._shards: dict[int, Shard] = {}
        self._waiting: list[socket.socket] = []
        self._answer: tuple[dict[str, object], int | None] | None = None
        threading.Thread(target=self._serve, name="flexkv-session", daemon=True).start()

    def gather(self, mine: Shard, ranks: int) -> list[Shard]:
        """Wait for the other ranks' shards; all of them, in the order of ranks."""
        deadline = time.monotonic() + MEET_SECONDS
        with self._changed:
            while len(self._shards) < ranks - 1:
                if not self._changed.wait(deadline - time.monotonic()):
                    missing = sorted(set(range(1, ranks)) - set(self._shards))
                    raise ArenaError(
                        f"ranks {missing} of engine {self._name!r} did not join within "
                        f"{MEET_SECONDS:.0f} s; allowed: all {ranks} ranks on one machine"
                    )
            shards = [mine, *(self._shards[rank] for rank in sorted(self._shards))]
        for shard in shards:
            if shard.kind != mine.kind:
                raise ArenaError(
                    f"rank {shard.rank} of engine {self._name!r} has another KV cache than rank "
                    f"0 ({shard} against {mine}); allowed: the same in all ranks"
                )
        return shards

    def hand_out(self, info: SessionInfo, fd: int) -> None:
        """Give the arena to everyone who asked, and from now on to everyone who asks."""
        self._settle(info.to_json(), fd)

    def refuse(self, reason: str) -> None:
        """Tell everyone who asked, and who will ask, that there is no arena."""
        self._settle({"error": reason}, None)

    def close(self) -> None:
        """Give up the name. The next engine may take it."""
        self._path.unlink(missing_ok=True)
        # Wakes the accepting thread, which a plain close would not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _settle(self, message: dict[str, object], fd: int | None) -> None:
        with self._changed:
            self._answer = (message, fd)
            waiting, self._waiting = self._waiting, []
        for connection in waiting:
            _reply(connection, message, fd)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                connection.settimeout(_GREETING_SECONDS)
                self._greet(connection)
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.warning("refused a connection to session %r: %s", self._name, error)
                _reply(connection, {"error": f"not a FlexKV greeting: {error}"}, None)

    def _greet(self, connection: socket.socket) -> None:
        if _peer_uid(connection) != os.getuid():
            raise ValueError("the peer is another user")
        line = _receive_line(connection)
        if not line:
            connection.close()  # another engine asks whether this one lives: see _owner
            return
        message = _parse(line)
        with self._changed:
            if "rank" in message:
                refusal = self._take_shard(message["rank"])
                if refusal is not None:
                    _reply(connection, {"error": refusal}, None)
                    return
            answer = self._answer
            if answer is None:
                self._waiting.append(connection)
        if answer is not None:
            _reply(connection, *answer)

    def _take_shard(self, fields: object) -> str | None:
        if not isinstance(fields, dict):
            raise ValueError("rank is not a mapping")
        shard = Shard(
            _as_int(fields["rank"]),
            str(fields["fingerprint"]),
            _as_int(fields["engine_blocks"]),
            _as_int(fields["shard_bytes"]),
            _as_int(fields["replicas"]),
            None if fields["numa_node"] is None else _as_int(fields["numa_node"]),
            fields["durable"] is True,
        )
        if shard.rank in self._shards or shard.rank == 0:
            return _owned_message(self._name, os.getpid())
        self._shards[shard.rank] = shard
        self._changed.notify_all()
        return None


def _socket_path(root: pathlib.Path, name: str) -> pathlib.Path:
    # Engine ids are free text, of any length.
    return root / (hashlib.blake2b(name.encode(), digest_size=16).hexdigest() + ".sock")


@contextlib.contextmanager
def _short(path: pathlib.Path) -> Iterator[str]:
    """An address for `path` that fits the 107 bytes a socket's may have, wherever it lies."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def _own_socket(root: pathlib.Path, name: str) -> tuple[socket.socket, pathlib.Path]:
    """Become the one process that listens for `name`, and clean up after killed engines."""
    path = _socket_path(root, name)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _lock(root / "lock"):
            _sweep(root)
            owner = _owner(path)
            if owner is not None:
                raise ArenaError(_owned_message(name, owner))
            listener = socket.socket(socket.AF_UNIX)
            mask = os.umask(0o177)
            try:
                with _short(path) as address:
                    listener.bind(address)
            finally:
                os.umask(mask)
            listener.listen(64)
            return listener, path
    except OSError as error:
        raise ArenaError(
            f"runtime_dir {str(root)!r} cannot be used: {error}; allowed: an absolute path "
            f"of a directory that this user can create and write"
        ) from None


@contextlib.contextmanager
def _lock(path: pathlib.Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _sweep(root: pathlib.Path) -> None:
    for path in root.glob("*.sock"):
        if _owner(path) is None:
            path.unlink(missing_ok=True)


def _owner(path: pathlib.Path) -> int | None:
    """Process that listens at `path`; None if nobody does."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            with _short(path) as address:
                probe.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        return _peer_pid(probe)


def _owned_message(name: str, pid: int) -> str:
    return (
        f"the arena of engine id {name!r} is owned by the living process {pid}; allowed: an "
        f"engine_id of its own for every engine (leave it out to get one)"
    )


def _connect(root: pathlib.Path, name: str, greeting: dict[str, object]) -> Session:
    path = _socket_path(root, name)
    deadline = time.monotonic() + MEET_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(MEET_SECONDS)
        try:
            with _short(path) as address:
                connection.connect(address)
            break
        except OSError as error:
            connection.close()
            absent = isinstance(error, FileNotFoundError | ConnectionRefusedError)
            if not absent or time.monotonic() > deadline:
                raise ArenaError(
                    f"rank 0 of engine {name!r} does not answer at {path}: {error}; allowed: all "
                    f"processes of an engine on one machine, with the same runtime_dir"
                ) from None
            time.sleep(_RETRY_SECONDS)
    with connection:
        return _receive_session(connection, name, greeting)


def _receive_session(connection: socket.socket, name: str, greeting: dict[str, object]) -> Session:
    try:
        connection.sendall(json.dumps(greeting).encode() + b"\n")
        message, fd = _receive_with_fd(connection)
    except (OSError, ValueError) as error:
        raise ArenaError(f"rank 0 of engine {name!r} broke off: {error}") from None
    if "error" in message or fd is None:
        raise ArenaError(str(message.get("error", "rank 0 sent no arena")))
    info = SessionInfo.from_json(message)
    return Session(info, Arena(fd, info.spec))


def _reply(connection: socket.socket, message: dict[str, object], fd: int | None) -> None:
    line = json.dumps(message).encode() + b"\n"
    with connection:
        try:
            socket.send_fds(connection, [line], [] if fd is None else [fd])
        except OSError as error:
            logger.warning("a peer left before it got its answer: %s", error)


def _receive_line(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as stream:
        return stream.readline(_MAX_MESSAGE)


def _receive_with_fd(connection: socket.socket) -> tuple[dict[str, object], int | None]:
    line, fds, _, _ = socket.recv_fds(connection, 65536, 1)
    try:
        for fd in fds:
            os.set_inheritable(fd, False)
        while line and not line.endswith(b"\n") and len(line) < _MAX_MESSAGE:
            line += connection.recv(65536)
        return _parse(line), fds[0] if fds else None
    except (OSError, ValueError):
        for fd in fds:
            os.close(fd)
        raise


def _parse(line: bytes) -> dict[str, object]:
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("message is not a mapping")
    return message


def _as_int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _peer_credentials(connection: socket.socket) -> tuple[int, int, int]:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = array.array("i", data)
    return pid, uid, gid


def _peer_pid(connection: socket.socket) -> int:
    return _peer_credentials(connection)[0]


def _peer_uid(connection: socket.socket) -> int:
    return _peer_credentials(connection)[1]
