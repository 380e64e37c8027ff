# SPDX-License-Identifier: Apache-2.0
"""Blocks in Mooncake Store, read into and written from the arena without a copy.

The store verifies nothing, so an object holds a block's envelope and its bytes. The two come from
two pieces of registered memory: the envelope's buffer and the arena's slot.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import TracebackType
from typing import Any

from flexkv.tiers.envelope import ENVELOPE_BYTES, fits, seal
from flexkv.tiers.job import Outcome, Result
from flexkv.tiers.mooncake.member import NO_SPACE, Member, MooncakeError, error_of
from flexkv.tiers.questions import Found
from flexkv.tiers.remote import NamedQuestion, address_of

_TOO_LONG = -600
_NOT_READY = -703
_NOT_FOUND = -704
_TRANSFER_FAILED = -800
"""Error codes of Mooncake 0.3.13. A transfer fails in a network that fails, and also if the object
is shorter than asked."""


class Turns:
    """Limits the number of threads that do something at once, as `threading.Semaphore` does, but
    first come, first served: a semaphore lets a thread that has just left in again before those
    that wait.

    Args:
        count: the most threads inside at once, not counting those that hang.
        hang_seconds: a thread that stays longer hangs, and the next one may come.
    """

    def __init__(self, count: int, hang_seconds: float) -> None:
        self._count = count
        self._hang_seconds = hang_seconds
        self._changed = threading.Condition()
        self._waiting: deque[int] = deque()  # threads
        self._inside: dict[int, float] = {}  # by thread, when it hangs

    @property
    def waiting(self) -> int:
        """The number of threads that wait."""
        return len(self._waiting)

    def __enter__(self) -> None:
        own = threading.get_ident()
        with self._changed:
            self._waiting.append(own)
            while self._waiting[0] != own or not self._is_free():
                self._changed.wait(self._until_hang())
            self._waiting.popleft()
            self._inside[own] = time.monotonic() + self._hang_seconds
            self._changed.notify_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            del self._inside[threading.get_ident()]
            self._changed.notify_all()

    def _is_free(self) -> bool:
        now = time.monotonic()
        return sum(hangs > now for hangs in self._inside.values()) < self._count

    def _until_hang(self) -> float | None:
        """Seconds until the next thread inside hangs; None if there is none."""
        now = time.monotonic()
        return min((hangs - now for hangs in self._inside.values() if hangs > now), default=None)


class MooncakeBlocks:
    """A `flexkv.tiers.remote.BlockStore`. Thread-safe.

    Its calls raise `MooncakeError` if the arena could not be registered or the master fails.

    Args:
        member: joins the store with `open`; owned.
        config: Mooncake's `ReplicateConfig` of each write.
        slot_bytes: bytes of a block.
        blocks: most blocks that are read or written at the same time; each has a buffer of
            `ENVELOPE_BYTES` here.
        transfers: calls that move bytes at the same time. Other calls verify or seal meanwhile.
        timeout_seconds: a call that moves bytes for longer hangs, and another one may begin.
    """

    prefix = "flexkv"

    def __init__(
        self,
        member: Member,
        config: Any,
        *,
        slot_bytes: int,
        blocks: int,
        transfers: int,
        timeout_seconds: float,
    ) -> None:
        self._member = member
        self._config = config
        self._sizes = [ENVELOPE_BYTES, slot_bytes]
        # In their order: of a prefix, only blocks without a gap before them can be loaded.
        self._transfers = Turns(transfers, timeout_seconds)
        self._memory = mmap.mmap(-1, blocks * ENVELOPE_BYTES)
        view = memoryview(self._memory)
        self._envelopes: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for i in range(blocks):
            self._envelopes.put(view[i * ENVELOPE_BYTES : (i + 1) * ENVELOPE_BYTES])
        member.register(address_of(view), len(view))

    def register(self, address: int, size: int) -> None:
        self._member.register(address, size)

    def open(self) -> None:
        self._member.join()

    def find(
        self, questions: Sequence[NamedQuestion], answer: Callable[[int, Found], None]
    ) -> None:
        """See `BlockStore.find`. Takes one call of the client."""
        self._member.check_registered()
        names = [name for question in questions for each in question for name in each]
        there = iter(self._exist(names))
        for number, question in enumerate(questions):
            answer(number, list(islice(there, sum(map(len, question)))))

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Result]:
        self._member.check_registered()
        with self._borrowed(len(names)) as envelopes:
            addresses = _addresses(envelopes, buffers)
            with self._transfers:
                codes = self._member.client.batch_get_into_multi_buffers(
                    list(names), addresses, [self._sizes] * len(names)
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
            self._member.client.batch_remove(damaged, True)
        return outcomes

    def put(self, names: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Result]:
        self._member.check_registered()
        results: list[Result] = [Outcome.DONE] * len(names)
        absent = [i for i, there in enumerate(self._exist(names)) if not there]
        if not absent:
            return results
        with self._borrowed(len(absent)) as envelopes:
            for i, envelope in zip(absent, envelopes, strict=True):
                envelope[:] = seal(names[i].encode(), buffers[i])
            addresses = _addresses(envelopes, [buffers[i] for i in absent])
            with self._transfers:
                codes = self._member.client.batch_put_from_multi_buffers(
                    [names[i] for i in absent],
                    addresses,
                    [self._sizes] * len(absent),
                    self._config,
                )
        # Mooncake reports success, too, for an object that another client is writing and that may
        # never be complete.
        complete = self._exist([names[i] for i in absent])
        for i, code, there in zip(absent, codes, complete, strict=True):
            if code == NO_SPACE:
                results[i] = Outcome.DROPPED
            elif code != 0:
                results[i] = error_of("a write", code)
            elif not there:
                results[i] = MooncakeError("the object is not complete: another client writes it")
        return results

    def close(self) -> None:
        self._member.close()

    def _exist(self, names: Sequence[str]) -> list[bool]:
        codes = self._member.client.batch_is_exist(list(names))
        failed = next((code for code in codes if code < 0), None)
        if failed is not None:
            raise error_of("a question to the master", failed)
        return [code == 1 for code in codes]

    def _verify(self, name: str, code: int, envelope: memoryview, buffer: memoryview) -> Result:
        if code in (_NOT_FOUND, _NOT_READY):
            return Outcome.MISSING
        if code == _TOO_LONG:
            return Outcome.DAMAGED
        size = sum(self._sizes)
        if code == _TRANSFER_FAILED and 0 <= self._member.client.get_size(name) < size:
            return Outcome.DAMAGED
        if code < 0:
            return error_of("a read", code)
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


def _addresses(envelopes: Sequence[memoryview], buffers: Sequence[memoryview]) -> list[list[int]]:
    return [
        [address_of(envelope), address_of(buffer)]
        for envelope, buffer in zip(envelopes, buffers, strict=True)
    ]
