# SPDX-License-Identifier: Apache-2.0
"""Blocks in Mooncake Store, read into and written from the arena without a copy.

The store verifies nothing, so an object holds a block's envelope and its bytes. The two come from
two pieces of registered memory: the envelope's buffer and the arena's slot.
"""

from __future__ import annotations

import contextlib
import http.client
import mmap
import queue
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from flexkv.tiers.envelope import ENVELOPE_BYTES, fits, seal
from flexkv.tiers.epochs import Epochs
from flexkv.tiers.job import Outcome, Result
from flexkv.tiers.questions import Found, Question
from flexkv.tiers.remote import address_of
from flexkv.tiers.turns import Turns
from flexkv.types.deadline import call_within

_NO_SPACE = -200
_TOO_LONG = -600
_NOT_READY = -703
_NOT_FOUND = -704
_TRANSFER_FAILED = -800
"""Error codes of Mooncake 0.3.13. A transfer fails in a network that fails, and also if the object
is shorter than asked."""

_SETTLE_SECONDS = 0.5
"""Wait after the creation of a record. The metadata server has no conditional writes: if several
nodes create a record at once, the last one wins, and all nodes that waited read it. A node that
writes even later shares blocks with no other. Not tuned."""


_ANSWER_BYTES = 4096
"""The most bytes of an epoch's record that are read; FlexKV's have 80."""


class MooncakeError(OSError):
    """A call to Mooncake Store or its metadata server failed."""


class Client(Protocol):
    """The part of `mooncake.store.MooncakeDistributedStore` that FlexKV calls.

    Every call but the first two releases the interpreter's lock while it waits. Calls return 0 or
    sizes in bytes, and negative codes for errors. Addresses and sizes are in bytes; the memory
    behind them stays the caller's and must be registered.
    """

    def register_buffer(self, address: int, size: int, /) -> int: ...

    def close(self) -> int: ...

    def batch_is_exist(self, names: list[str], /) -> list[int]: ...

    def get_size(self, name: str, /) -> int: ...

    def batch_get_into_multi_buffers(
        self, names: list[str], addresses: list[list[int]], sizes: list[list[int]], /
    ) -> list[int]: ...

    def batch_put_from_multi_buffers(
        self, names: list[str], addresses: list[list[int]], sizes: list[list[int]], config: Any, /
    ) -> list[int]: ...

    def batch_remove(self, names: list[str], force: bool, /) -> list[int]: ...


class MooncakeBlocks:
    """A `flexkv.tiers.remote.BlockStore` of one fingerprint. Thread-safe.

    Its calls raise `MooncakeError` if the arena could not be registered or the master fails.

    Args:
        join: makes a client that has joined the store; `close` closes it. May wait for ever.
            Raises OSError if that fails.
        config: Mooncake's `ReplicateConfig` of each write.
        epochs: of the fingerprint.
        fingerprint: of the blocks.
        slot_bytes: bytes of a block.
        blocks: most blocks that are read or written at the same time; each has a buffer of
            `ENVELOPE_BYTES` here.
        transfers: calls that move bytes at the same time. Other calls verify or seal meanwhile.
        timeout_seconds: a call that moves bytes for longer hangs, and another one may begin.
    """

    def __init__(
        self,
        join: Callable[[], Client],
        config: Any,
        epochs: Epochs,
        fingerprint: str,
        *,
        slot_bytes: int,
        blocks: int,
        transfers: int,
        timeout_seconds: float,
    ) -> None:
        self._join = join
        self._joined: Client | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._unregistered: list[tuple[int, int]] = []
        self._config = config
        self._epochs = epochs
        self._fingerprint = fingerprint
        self._sizes = [ENVELOPE_BYTES, slot_bytes]
        # In their order: of a prefix, only blocks without a gap before them can be loaded.
        self._transfers = Turns(transfers, timeout_seconds)
        self._memory = mmap.mmap(-1, blocks * ENVELOPE_BYTES)
        view = memoryview(self._memory)
        self._envelopes: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for i in range(blocks):
            self._envelopes.put(view[i * ENVELOPE_BYTES : (i + 1) * ENVELOPE_BYTES])
        self.register(address_of(view), len(view))

    @property
    def _client(self) -> Client:
        if self._joined is None:
            raise MooncakeError("Mooncake was not joined yet")
        return self._joined

    def register(self, address: int, size: int) -> None:
        with self._lock:
            self._unregistered.append((address, size))
            self._register()

    def open(self) -> str:
        epoch = self._epochs.open()
        if self._joined is None:
            client = self._join()
            with self._lock:
                if self._closed:
                    # The memory may be gone, too.
                    client.close()
                    raise MooncakeError("Mooncake was closed while it was joined")
                self._joined = client
                self._register()
        return epoch

    def find(
        self, epoch: str, questions: Sequence[Question], answer: Callable[[int, Found], None]
    ) -> None:
        """See `BlockStore.find`. Takes one call of the client."""
        folder = self._folder(epoch)
        keys = [key for question in questions for each in question for key in each]
        there = iter(self._exist([self._name(folder, key) for key in keys]))
        for number, question in enumerate(questions):
            answer(number, list(islice(there, sum(map(len, question)))))

    def get(
        self, epoch: str, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Sequence[Result]:
        folder = self._folder(epoch)
        names = [self._name(folder, key) for key in keys]
        with self._borrowed(len(keys)) as envelopes:
            addresses = _addresses(envelopes, buffers)
            with self._transfers:
                codes = self._client.batch_get_into_multi_buffers(
                    names, addresses, [self._sizes] * len(names)
                )
            outcomes = [
                self._verify(name, code, envelope, buffer)
                for name, code, envelope, buffer in zip(
                    names, codes, envelopes, buffers, strict=True
                )
            ]
        damaged = [
            name
            for name, outcome in zip(names, outcomes, strict=True)
            if outcome is Outcome.DAMAGED
        ]
        if damaged:
            # Forced, because this node's reads hold leases on them; a put would not overwrite them.
            self._client.batch_remove(damaged, True)
        return outcomes

    def put(
        self, epoch: str, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Sequence[Result]:
        folder = self._folder(epoch)
        names = [self._name(folder, key) for key in keys]
        results: list[Result] = [Outcome.DONE] * len(keys)
        absent = [i for i, there in enumerate(self._exist(names)) if not there]
        if not absent:
            return results
        with self._borrowed(len(absent)) as envelopes:
            for i, envelope in zip(absent, envelopes, strict=True):
                envelope[:] = seal(names[i].encode(), buffers[i])
            addresses = _addresses(envelopes, [buffers[i] for i in absent])
            with self._transfers:
                codes = self._client.batch_put_from_multi_buffers(
                    [names[i] for i in absent],
                    addresses,
                    [self._sizes] * len(absent),
                    self._config,
                )
        # Mooncake reports success, too, for an object that another client is writing and that may
        # never be complete.
        complete = self._exist([names[i] for i in absent])
        for i, code, there in zip(absent, codes, complete, strict=True):
            if code == _NO_SPACE:
                results[i] = Outcome.DROPPED
            elif code != 0:
                results[i] = _error("a write", code)
            elif not there:
                results[i] = MooncakeError("the object is not complete: another client writes it")
        return results

    def renew_epoch(self) -> None:
        self._epochs.renew()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._joined is not None:
                self._joined.close()

    def _register(self) -> None:
        """Register the memory that is not registered, once there is a client. Under the lock."""
        if self._joined is not None:
            self._unregistered = [
                each for each in self._unregistered if self._joined.register_buffer(*each) != 0
            ]

    def _folder(self, epoch: str) -> str:
        if self._unregistered:
            with self._lock:
                self._register()
            if self._unregistered:
                raise MooncakeError("Mooncake cannot register the host memory")
        return self._epochs.folder(epoch)

    def _name(self, folder: str, key: bytes) -> str:
        return f"flexkv/{self._fingerprint}/{folder}/{key.hex()}"

    def _exist(self, names: list[str]) -> list[bool]:
        codes = self._client.batch_is_exist(names)
        failed = next((code for code in codes if code < 0), None)
        if failed is not None:
            raise _error("a question to the master", failed)
        return [code == 1 for code in codes]

    def _verify(self, name: str, code: int, envelope: memoryview, buffer: memoryview) -> Result:
        if code in (_NOT_FOUND, _NOT_READY):
            return Outcome.MISSING
        if code == _TOO_LONG:
            return Outcome.DAMAGED
        size = sum(self._sizes)
        if code == _TRANSFER_FAILED and 0 <= self._client.get_size(name) < size:
            return Outcome.DAMAGED
        if code < 0:
            return _error("a read", code)
        whole = code == size
        return Outcome.DONE if whole and fits(envelope, name.encode(), buffer) else Outcome.DAMAGED

    @contextlib.contextmanager
    def _borrowed(self, count: int) -> Iterator[list[memoryview]]:
        envelopes = [self._envelopes.get_nowait() for _ in range(count)]
        try:
            yield envelopes
        finally:
            for envelope in envelopes:
                self._envelopes.put(envelope)


class MetadataRecord:
    """A `flexkv.tiers.epochs.EpochRecord` at Mooncake's metadata server.

    In the store itself the record could be evicted, or vanish with the node that holds it. The
    methods raise `OSError` if the server fails or does not answer in time.

    Args:
        url: of the metadata server.
        fingerprint: of the blocks.
        timeout_seconds: longest wait for each request.
    """

    def __init__(self, url: str, fingerprint: str, timeout_seconds: float) -> None:
        parts = urllib.parse.urlsplit(url)
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._secure else 80)
        key = urllib.parse.quote(f"flexkv/epochs/{fingerprint}", safe="")
        self._path = f"{parts.path}?key={key}"
        self._timeout_seconds = timeout_seconds

    def read(self) -> bytes | None:
        status, data = self._request("GET")
        if status == http.client.NOT_FOUND:
            return None
        return self._check(status, data)

    def create(self, record: bytes) -> None:
        if self.read() is None:
            self.replace(record)
            time.sleep(_SETTLE_SECONDS)

    def replace(self, record: bytes) -> None:
        self._check(*self._request("PUT", record))

    def _check(self, status: int, data: bytes) -> bytes:
        if status != http.client.OK:
            raise MooncakeError(f"Mooncake's metadata server answered with HTTP status {status}")
        return data

    def _request(self, method: str, body: bytes | None = None) -> tuple[int, bytes]:
        # http.client, since urllib would send it through the proxies of the environment.
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        made = kind(self._host, self._port, timeout=self._timeout_seconds)
        opened: list[socket.socket] = []
        given_up = threading.Event()

        def ask() -> tuple[int, bytes]:
            made.connect()
            opened.append(made.sock)
            if given_up.is_set():
                made.close()
                raise TimeoutError("the connection came too late")
            made.request(method, self._path, body)
            answer = made.getresponse()
            return answer.status, answer.read(_ANSWER_BYTES)

        try:
            # The timeout of a connection is for each of its pieces, and not for a name's address.
            ended = call_within({self._host: ask}, self._timeout_seconds)
            if not ended:
                given_up.set()
                _hang_up(opened)
                raise MooncakeError(
                    f"Mooncake's metadata server did not answer within {self._timeout_seconds:g} s"
                )
            return ended[self._host]
        except http.client.HTTPException as error:
            raise MooncakeError(
                f"Mooncake's metadata server answered with {type(error).__name__}"
            ) from None
        finally:
            made.close()


def _error(what: str, code: int) -> MooncakeError:
    return MooncakeError(f"{what} ended with code {code} of Mooncake")


def _hang_up(opened: Sequence[socket.socket]) -> None:
    """End the thread that reads from a connection."""
    for each in opened:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _addresses(envelopes: Sequence[memoryview], buffers: Sequence[memoryview]) -> list[list[int]]:
    return [
        [address_of(envelope), address_of(buffer)]
        for envelope, buffer in zip(envelopes, buffers, strict=True)
    ]
