# SPDX-License-Identifier: Apache-2.0
"""Blocks as objects in S3, GCS, Azure or a directory, through obstore.

Each block is an object of its own, so a block that many prefixes share is stored once. FlexKV
deletes no object; it overwrites a damaged object when the block is stored again. The bucket's own
lifecycle rules expire old objects: all blocks lie in `blocks/`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from flexkv.tiers.envelope import ENVELOPE_BYTES, fits, seal
from flexkv.tiers.job import Outcome, Result
from flexkv.tiers.objects.object_errors import (
    NOT_IMPLEMENTED,
    AbsentError,
    ExistsError,
    StoreError,
    describe,
)
from flexkv.tiers.questions import Found
from flexkv.tiers.remote import NamedQuestion

if TYPE_CHECKING:
    from obstore.store import ObjectStore

logger = logging.getLogger(__name__)

REQUESTS = 64
"""Concurrent reads and writes. By arithmetic they reach 2 GB/s with blocks of 2 MiB and 60 ms a
request."""

QUESTIONS = 128
"""Concurrent requests whether an object is there. They do not wait for reads and writes. By
arithmetic they reach 2,100 a second with 60 ms a request: as many misses, or 66 prefixes of 256
blocks."""

PROBES = 16
"""Blocks of a prefix that are looked up at once. For a prefix of 256 blocks, 32 requests in two
round trips find its stored length. A request for each block would be 256, and buckets charge for
requests."""

MULTIPART_BYTES = 64 << 20
"""Larger blocks are uploaded in parts."""

_PART_BYTES = 16 << 20
_PARTS = 4
"""Concurrent parts of one upload. Not tuned."""

_COPY_BYTES = 1 << 20
"""Bytes of one copy, which holds the interpreter's lock. Not tuned."""

_SETTLE_SECONDS = 0.05
"""Pause in `close`. After an answer, obstore's threads still need the interpreter to release the
request's objects; a release while the interpreter ends aborts the process. At load 8 on 2 cores, 7
of 120 processes that ended right after `close` aborted without this pause, and none with it."""

_RECORD_BYTES = 4096
"""The most bytes of an epoch's record; FlexKV's have 80."""

_DAMAGED = 1 << 12
"""Most names of damaged objects that are remembered."""

_CREATIONS = 2
"""Attempts to create an object while another writer creates or removes it."""

RECORD_SECONDS = 0.5
"""Wait after the creation of a record in a bucket without conditional writes. If several processes
create it at once, the last one wins, and all processes that waited read its record. Not tuned."""

_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
"""Parts of the errors of S3, Azure and GCS about a missing bucket. That about a missing object has
the same status."""

T = TypeVar("T")


class ObjectBlocks:
    """A `flexkv.tiers.remote.BlockStore`. Thread-safe. Owns its requests."""

    prefix = "blocks"

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._damaged: dict[str, None] = {}
        self._missed = False

    def register(self, address: int, size: int) -> None:
        """Does nothing: blocks are copied from and to objects."""

    def open(self) -> None:
        """Does nothing: the record of the epoch is the first request."""

    def find(
        self, questions: Sequence[NamedQuestion], answer: Callable[[int, Found], None]
    ) -> None:
        """See `BlockStore.find`. The requests of all questions run at once, and a question does not
        wait for the others.

        A block of a prefix behind an absent one counts as absent, and a block before a present one
        as present. Each scattered block takes a request, and none if the first of the prefix is
        absent.
        """

        async def find(number: int, question: NamedQuestion) -> None:
            answer(number, await self._find(*question))

        ended = self._requests.run_all([find(*each) for each in enumerate(questions)])
        for number, error in enumerate(ended):
            if error is not None:
                answer(number, error)

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Result]:
        found = self._requests.run_all(
            [
                self._requests.get(name, ENVELOPE_BYTES + len(buffer))
                for name, buffer in zip(names, buffers, strict=True)
            ]
        )
        return [
            self._take(name, data, buffer)
            for name, data, buffer in zip(names, found, buffers, strict=True)
        ]

    def put(self, names: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Result]:
        # As in `find`, blocks behind an absent one count as absent. If one is there all the same,
        # the store keeps it, and its bytes were sent in vain.
        first = self._requests.run_all([self._has(name) for name in names[:1]])
        failed = [each for each in first if isinstance(each, OSError)]
        if failed:
            return failed * len(names)
        ask = first == [True]
        done = self._requests.run_all(
            [self._put(name, buffer, ask) for name, buffer in zip(names, buffers, strict=True)]
        )
        return [each if isinstance(each, OSError) else Outcome.DONE for each in done]

    def close(self) -> None:
        self._requests.close()

    async def _find(self, names: Sequence[str], others: Sequence[str]) -> list[bool]:
        there = await self._reach(names) if names else 0
        found = [i < there for i in range(len(names))]
        if names and not there:
            return found + [False] * len(others)
        return found + list(await asyncio.gather(*map(self._has, others)))

    async def _reach(self, names: Sequence[str]) -> int:
        """How many leading blocks of a prefix the store has, by a search among them. If the last
        search has found none, this one begins with a request for the first block alone."""
        there, absent = 0, len(names)
        if self._missed:
            there = int(await self._has(names[0]))
            absent = len(names) if there else 0
        while there < absent:
            # The next block is always among them, because it alone shows most misses.
            step = -(-(absent - there) // PROBES)
            asked = list(range(there, absent, step))
            found = await asyncio.gather(*(self._has(names[i]) for i in asked))
            for i, has in zip(asked, found, strict=True):
                if not has:
                    absent = i
                    break
                there = i + 1
        self._missed = not there
        return there

    async def _has(self, name: str) -> bool:
        return name not in self._damaged and await self._requests.has(name)

    async def _put(self, name: str, block: memoryview, ask: bool) -> None:
        damaged = name in self._damaged
        if ask and not damaged and await self._requests.has(name):
            return
        # Only blocks that are sent are sealed.
        envelope = await asyncio.to_thread(seal, name.encode(), block)
        parts: list[bytes | memoryview] = [envelope, block]
        if not await self._requests.put(name, parts, overwrite=damaged):
            await self._requests.put(name, parts, overwrite=True)
        self._damaged.pop(name, None)

    def _take(self, name: str, data: memoryview | OSError | None, buffer: memoryview) -> Result:
        if data is None:
            return Outcome.MISSING
        if isinstance(data, OSError):
            return data
        block = data[ENVELOPE_BYTES:]
        if len(block) != len(buffer) or not fits(data[:ENVELOPE_BYTES], name.encode(), block):
            if len(self._damaged) < _DAMAGED:
                self._damaged[name] = None
            return Outcome.DAMAGED
        for start in range(0, len(block), _COPY_BYTES):
            buffer[start : start + _COPY_BYTES] = block[start : start + _COPY_BYTES]
        return Outcome.DONE


class ObjectRecord:
    """A `flexkv.tiers.epochs.EpochRecord` as an object outside `blocks/`, where no lifecycle rule
    expires it. The methods raise `StoreError` if the store fails or does not answer in time."""

    def __init__(self, requests: Requests, fingerprint: str) -> None:
        self._requests = requests
        self._name = f"epochs/{fingerprint}"

    def read(self) -> bytes | None:
        data = self._requests.run(self._requests.get(self._name, _RECORD_BYTES))
        return None if data is None else bytes(data)

    def create(self, record: bytes) -> None:
        self._requests.run(self._requests.put(self._name, [record], overwrite=False))
        if not self._requests.conditional:
            time.sleep(RECORD_SECONDS)

    def replace(self, record: bytes) -> None:
        self._requests.run(self._requests.put(self._name, [record], overwrite=True))


def fingerprints_in(store: ObjectStore) -> list[str]:
    """Fingerprints of all blocks that engines have shared in a bucket, sorted.

    Needs the permission to list the bucket, which engines do not need. Raises StoreError if the
    bucket does not answer.
    """
    try:
        pages = list(obstore.list(store, "epochs"))
    except (BaseError, OSError, ValueError) as error:
        raise StoreError(*describe(error)) from None
    return sorted(each["path"].rpartition("/")[2] for page in pages for each in page)


def reach(store: ObjectStore) -> None:
    """Ask a bucket for an object that is not there. Raises StoreError if the bucket is missing,
    refuses the request or does not answer."""
    try:
        obstore.get(store, "epochs/none")
    except FileNotFoundError as error:
        text, status = describe(error)
        if any(each in text for each in _NO_BUCKET):
            raise AbsentError(text, status) from None
    except (BaseError, OSError, ValueError) as error:
        raise StoreError(*describe(error)) from None


class Requests:
    """Concurrent requests to an object store, on one thread of their own. Thread-safe.
    `timeout_seconds`: longest time of each coroutine given to `run` and `run_all`. `conditional`:
    whether the store creates objects only if they are absent, as far as known."""

    def __init__(self, store: ObjectStore, timeout_seconds: float) -> None:
        self.conditional = True
        self._store = store
        self._timeout_seconds = timeout_seconds
        self._loop = asyncio.new_event_loop()
        self._free = asyncio.Semaphore(REQUESTS)
        self._free_to_ask = asyncio.Semaphore(QUESTIONS)
        # A daemon: a request that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="flexkv-objects-io", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises OSError if `work` fails or takes too long, or `close` has
        ended."""
        if self._loop.is_closed():
            work.close()  # nothing will await it
            raise StoreError("the connection to the object store is closed")
        return asyncio.run_coroutine_threadsafe(self._timed(work), self._loop).result()

    def run_all(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T | OSError]:
        """The result of each of `works`, or the OSError that it ended with, in their order. Returns
        when all have ended, because each may use memory that the caller lends. Raises the
        first error of another kind."""

        async def gather() -> list[T | OSError]:
            ended = await asyncio.gather(*map(self._result, works), return_exceptions=True)
            results: list[T | OSError] = []
            for each in ended:
                if isinstance(each, BaseException) and not isinstance(each, OSError):
                    raise each
                results.append(each)
            return results

        return asyncio.run_coroutine_threadsafe(gather(), self._loop).result()

    async def has(self, name: str) -> bool:
        return await self.size(name) is not None

    async def size(self, name: str) -> int | None:
        """Bytes of an object; None if there is no such object."""
        try:
            meta = await self._ask(lambda: obstore.head_async(self._store, name), self._free_to_ask)
        except AbsentError:
            return None
        return int(meta["size"])

    async def get(self, name: str, most: int) -> memoryview | None:
        """The bytes of an object, which the caller owns; None if there is no such object.

        Of an object of more than `most` bytes, nothing is read, and the result is empty: whoever
        can write to a bucket could fill this machine's memory.
        """

        async def read() -> memoryview:
            result = await obstore.get_async(self._store, name)
            return memoryview(b"" if result.meta["size"] > most else await result.bytes_async())

        try:
            return await self._ask(read)
        except AbsentError:
            return None

    async def put(self, name: str, parts: Sequence[bytes | memoryview], overwrite: bool) -> bool:
        """Write an object of the concatenated `parts`, which are borrowed until the end. Without
        `overwrite`, an object of that name stays, which is no error. Returns whether the object is
        there with this size: False if one of another size has stayed. Raises StoreError if the
        store fails, or another writer keeps it from writing."""
        size = sum(map(len, parts))
        # No bucket has conditions for uploads in parts; two of them write the same bytes.
        large = size > MULTIPART_BYTES
        attempts = 0
        while self.conditional and not (overwrite or large):
            try:
                await self._put(name, parts, create=True)
            except ExistsError:
                # A 412 means that the object is there. A 409 means that on Azure; on S3 it means
                # that another writer has not ended, and may fail.
                there = await self.size(name)
                attempts += 1
                if there is None and attempts == _CREATIONS:
                    raise
                if there is not None:
                    return there == size
            except StoreError as error:
                if error.status != NOT_IMPLEMENTED:
                    raise
                self._give_up_conditions(error)
            else:
                return True
        await self._put(name, parts, large=large)
        return True

    def close(self) -> None:
        """End the thread; requests under way fail. Takes `_SETTLE_SECONDS`."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        time.sleep(_SETTLE_SECONDS)
        # This call of obstore frees what its threads dropped without the interpreter, as buffers.
        repr(self._store)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _give_up_conditions(self, error: StoreError) -> None:
        if self.conditional:
            self.conditional = False
            logger.warning(
                "the bucket has no conditional writes (%s); FlexKV writes without conditions, so "
                "that engines may send a block that another has just sent",
                error,
            )

    async def _put(
        self,
        name: str,
        parts: Sequence[bytes | memoryview],
        *,
        create: bool = False,
        large: bool = False,
    ) -> None:
        await self._ask(
            lambda: obstore.put_async(
                self._store,
                name,
                parts,
                mode="create" if create else "overwrite",
                use_multipart=large,
                chunk_size=_PART_BYTES,
                max_concurrency=_PARTS,
            )
        )

    async def _ask(
        self, request: Callable[[], Awaitable[T]], free: asyncio.Semaphore | None = None
    ) -> T:
        """The answer to a request. `free` bounds such requests; if None, the semaphore of reads and
        writes does.

        Raises:
            AbsentError: there is no such object, or for a write no such bucket.
            ExistsError: another object or write of that name keeps the store from writing it.
            StoreError: the store fails.
        """
        try:
            async with free or self._free:
                return await request()
        except FileNotFoundError as error:
            raise AbsentError(*describe(error)) from None
        except AlreadyExistsError as error:
            raise ExistsError(*describe(error)) from None
        except NotImplementedError as error:
            raise StoreError(describe(error)[0], NOT_IMPLEMENTED) from None
        except (BaseError, OSError, ValueError) as error:
            raise StoreError(*describe(error)) from None

    async def _result(self, work: Coroutine[Any, Any, T]) -> T | OSError:
        try:
            return await self._timed(work)
        except OSError as error:
            # The traceback of the error itself would keep the buffers of the block.
            return StoreError(str(error))

    async def _timed(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            # `wait_for` would end in a cycle of the error and its own frame, with all buffers.
            async with asyncio.timeout(self._timeout_seconds):
                return await work
        except TimeoutError:
            raise StoreError(
                f"the object store did not answer within {self._timeout_seconds:g} s"
            ) from None
