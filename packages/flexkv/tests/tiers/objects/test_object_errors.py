# SPDX-License-Identifier: Apache-2.0
"""What a bucket's errors do to blocks, buffers and the log."""

from __future__ import annotations

import contextlib
import gc
import mmap
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'flexkv[objects]'")

from certificates import Certificates
from faulty_s3 import SECRET, URL, FaultyS3
from shared_node import open_tier

from flexkv.preflight.checks import check_store
from flexkv.preflight.findings import Level
from flexkv.settings import CacheConfig
from flexkv.tiers.base import Answer
from flexkv.tiers.epochs import Epochs
from flexkv.tiers.job import Outcome, Result
from flexkv.tiers.objects import STORE
from flexkv.tiers.objects import object_store as module
from flexkv.tiers.objects.object_store import ObjectBlocks, ObjectRecord, Requests
from flexkv.tiers.objects.open_objects import connect
from packages.conftest import PATIENCE_SECONDS
from packages.patience import wait_until

SLOT = 4096
FINGERPRINT = "f" * 32
KEYS = [bytes([letter]) * 32 for letter in b"abc"]
DONE = Outcome.DONE


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    bucket = FaultyS3(monkeypatch)
    yield bucket
    bucket.close()


Start = Callable[[], "Node"]


@pytest.fixture
def start(bucket: FaultyS3, at_end: ExitStack) -> Start:
    def make() -> Node:
        node = Node()
        at_end.callback(node.blocks.close)
        return node

    return make


class Node:
    """The blocks of a bucket, and memory for them."""

    def __init__(self) -> None:
        self.store = connect(URL, PATIENCE_SECONDS)
        requests = Requests(self.store, PATIENCE_SECONDS)
        self.blocks = ObjectBlocks(requests)
        self.memory = mmap.mmap(-1, len(KEYS) * SLOT)
        self.epochs = Epochs(ObjectRecord(requests, FINGERPRINT))
        self.epoch = self.epochs.open()

    def buffers(self) -> list[memoryview]:
        return buffers(self.memory)

    def put(self) -> Sequence[Result]:
        return self._call(self.blocks.put, self.buffers())

    def get(self) -> Sequence[Result]:
        return self._call(self.blocks.get, self.buffers())

    def _call(
        self,
        call: Callable[[Sequence[str], Sequence[memoryview]], Sequence[Result]],
        buffers: Sequence[memoryview],
    ) -> Sequence[Result]:
        folder = f"{self.blocks.prefix}/{FINGERPRINT}/{self.epochs.folder(self.epoch)}"
        return call([f"{folder}/{key.hex()}" for key in KEYS], buffers)


def buffers(memory: mmap.mmap) -> list[memoryview]:
    view = memoryview(memory)
    return [view[i * SLOT : (i + 1) * SLOT] for i in range(len(KEYS))]


def of_blocks(
    status: int, code: str, methods: Sequence[str] = ("PUT",)
) -> Callable[[str, str, bool], tuple[int, str] | None]:
    """Answers with an error to requests for blocks."""
    return lambda method, path, _: (
        (status, code) if "/blocks/" in path and method in methods else None
    )


def names() -> list[str]:
    return [key.hex() for key in KEYS]


def texts(results: Sequence[Result]) -> list[str]:
    assert all(isinstance(each, OSError) for each in results)
    return [str(each) for each in results]


def test_a_conflict_with_another_writer_is_no_stored_block(start: Start, bucket: FaultyS3) -> None:
    node = start()
    bucket.fault = of_blocks(409, "ConditionalRequestConflict")
    assert all("409 Conflict, ConditionalRequestConflict" in each for each in texts(node.put()))
    assert bucket.blocks() == []
    bucket.fault = lambda *_: None
    assert node.put() == [DONE] * 3
    assert bucket.blocks() == names()


def test_a_conflict_that_ends_costs_one_more_request(start: Start, bucket: FaultyS3) -> None:
    node = start()
    met: set[str] = set()

    def once(method: str, path: str, conditional: bool) -> tuple[int, str] | None:
        if method != "PUT" or path in met:
            return None
        met.add(path)
        return 409, "ConditionalRequestConflict"

    bucket.fault = once
    assert node.put() == [DONE] * 3
    assert bucket.blocks() == names()


@pytest.mark.parametrize("status", [409, 412])
def test_a_block_that_another_engine_has_just_written_is_stored(
    start: Start, bucket: FaultyS3, status: int
) -> None:
    """Azure answers 409 to it, S3 and GCS 412."""
    node = start()

    def written_meanwhile(method: str, path: str, conditional: bool) -> tuple[int, str] | None:
        if method != "PUT":
            return None
        bucket.objects.setdefault(path, b"x" * (SLOT + module.ENVELOPE_BYTES))
        return status, "BlobAlreadyExists"

    bucket.fault = written_meanwhile
    assert node.put() == [DONE] * 3


def test_a_cut_object_is_no_stored_block(start: Start, bucket: FaultyS3) -> None:
    node = start()
    assert node.put() == [DONE] * 3
    for path in list(bucket.objects):
        if "/blocks/" in path and not path.endswith(names()[0]):
            bucket.objects[path] = bucket.objects[path][:100]
    # The first block is absent, so that the others are written without a question.
    del bucket.objects[next(path for path in bucket.objects if path.endswith(names()[0]))]
    assert node.put() == [DONE] * 3
    assert start().get() == [DONE] * 3


def test_a_missing_bucket_is_no_stored_block(start: Start, bucket: FaultyS3) -> None:
    node = start()
    bucket.fault = of_blocks(404, "NoSuchBucket", ("PUT", "HEAD"))
    assert all("404 Not Found, NoSuchBucket" in each for each in texts(node.put()))


def test_a_bucket_without_conditions_is_written_without(
    start: Start, bucket: FaultyS3, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.fault = lambda method, path, conditional: (
        (501, "NotImplemented") if conditional else None
    )
    node = start()
    assert node.put() == [DONE] * 3
    assert bucket.blocks() == names()
    (line,) = [each.getMessage() for each in caplog.records]
    assert "no conditional writes (GenericError: 501 Not Implemented, NotImplemented" in line


def test_creators_of_a_record_without_conditions_share_the_last(
    bucket: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of another process comes between the write and the read of one's own."""
    other = b"flexkv-epoch 1 " + b"a" * 32 + b" " + b"b" * 32

    def pause(seconds: float) -> None:
        assert seconds == module.RECORD_SECONDS
        bucket.objects[next(iter(bucket.objects))] = other

    bucket.fault = lambda method, path, conditional: (
        (501, "NotImplemented") if conditional else None
    )
    monkeypatch.setattr(module.time, "sleep", pause)
    node = Node()
    monkeypatch.undo()
    assert node.epoch == "a" * 32
    node.blocks.close()


@pytest.mark.parametrize("fault", [(503, "SlowDown"), (403, "AccessDenied")])
def test_a_bucket_that_fails_while_an_engine_starts_is_used_once_it_is_well(
    start: Start, bucket: FaultyS3, caplog: pytest.LogCaptureFixture, fault: tuple[int, str]
) -> None:
    start().put()
    bucket.fault = lambda *_: fault
    requests = len(bucket.requests)
    tier = open_tier(STORE, FINGERPRINT, SLOT, objects_url=URL)
    memory = mmap.mmap(-1, len(KEYS) * SLOT)
    others = [key * 2 for key in KEYS]
    tier.write(others, buffers(memory))
    assert [each.outcome for each in tier.poll()] == [Outcome.DROPPED] * 3
    assert f"objects_url {URL} cannot be used" in caplog.text
    assert f", {fault[1]}, Some words." in caplog.text
    assert all("/epochs/" in path for _, path in bucket.requests[requests:])

    bucket.fault = lambda *_: None
    wait_until(lambda: tier.readable)
    tier.query(KEYS)
    answers: list[Answer] = []
    wait_until(lambda: answers, lambda: answers.extend(tier.drain_answers()))
    assert [each.has for each in answers] == [[True] * 3]
    tier.write(others, buffers(memory))
    assert tier.close(PATIENCE_SECONDS)
    assert bucket.blocks() == sorted([*names(), *(key.hex() for key in others)])


def test_a_bucket_that_hangs_at_the_start_keeps_no_engine_from_ending(bucket: FaultyS3) -> None:
    go = threading.Event()

    def hang(*_: object) -> None:
        go.wait()

    bucket.fault = hang
    requests = Requests(connect(URL, PATIENCE_SECONDS), PATIENCE_SECONDS)
    epochs = Epochs(ObjectRecord(requests, FINGERPRINT))
    ended: list[BaseException] = []

    def open_epochs() -> None:
        try:
            epochs.open()
        except Exception as error:  # noqa: BLE001
            ended.append(error)

    opening = threading.Thread(target=open_epochs)
    opening.start()
    while not bucket.requests:
        time.sleep(0.001)
    requests.close()
    opening.join(PATIENCE_SECONDS)
    go.set()
    assert len(ended) == 1


def test_a_renewal_after_the_end_is_an_error(bucket: FaultyS3) -> None:
    """Of a thread that renews the epoch while the tier closes."""
    requests = Requests(connect(URL, PATIENCE_SECONDS), PATIENCE_SECONDS)
    epochs = Epochs(ObjectRecord(requests, FINGERPRINT))
    epochs.open()
    requests.close()
    with pytest.raises(OSError, match="is closed"):
        epochs.renew()


@pytest.mark.parametrize("status", [403, 503])
def test_an_error_names_status_code_and_message_and_no_secret(
    start: Start, bucket: FaultyS3, status: int
) -> None:
    node = start()
    bucket.fault = of_blocks(status, "SomeCode", ("PUT", "GET"))
    for results in (node.put(), node.get()):
        for text in texts(results):
            assert f"{status} " in text
            assert text.endswith(", SomeCode, Some words.")
            assert SECRET not in text


def test_an_unreachable_server_is_named_with_the_reason_and_no_address(
    bucket: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(OSError, match="Connection refused") as raised:
        Node()
    assert "127.0.0.1" not in str(raised.value)


def test_a_private_authority_is_named_with_the_way_to_trust_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificates = Certificates.write(tmp_path)
    bucket = FaultyS3(monkeypatch, certificates)
    said = r"InvalidCertificate UnknownIssuer \(SSL_CERT_FILE can name the certificate"
    with pytest.raises(OSError, match=said) as raised:
        Node()
    assert "127.0.0.1" not in str(raised.value)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.authority))
    node = Node()
    assert node.put() == [DONE] * 3
    node.blocks.close()
    bucket.close()


@pytest.mark.parametrize(
    ("scheme", "answer", "said"),
    [
        ("http", b"", "IncompleteMessage"),
        ("http", b"no answer\r\n\r\n", "Parse Version"),
        ("https", b"HTTP/1.1 200 OK\r\n\r\n", "InvalidMessage InvalidContentType"),
    ],
)
def test_a_server_of_another_protocol_is_named_by_what_it_did(
    bucket: FaultyS3, monkeypatch: pytest.MonkeyPatch, scheme: str, answer: bytes, said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(ConnectionError):
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"{scheme}://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(OSError, match=said):
            Node()
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("name", ["AWS_CA_BUNDLE", "AWS_PROFILE"])
def test_a_variable_that_the_client_does_not_read_is_named(
    bucket: FaultyS3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setenv(name, "mine")
    open_tier(STORE, FINGERPRINT, SLOT, objects_url=URL).close(PATIENCE_SECONDS)
    said = f"{name}: set, but without effect on objects_url; "
    assert said in caplog.text
    findings = check_store(CacheConfig(objects_url=URL), STORE)
    (found,) = [each for each in findings if each.level is Level.ADVICE]
    assert f"{found.text}; {found.change}" in caplog.text


def close_once_unused(memory: mmap.mmap, store: object) -> None:
    """The thread of the requests may hold a view for a moment after it has given the result, and
    obstore until its next call.

    Raises:
        BufferError: a view lives on.
    """
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        repr(store)
        try:
            memory.close()
        except BufferError:
            if time.monotonic() > end:
                raise
            time.sleep(0.001)
        else:
            return


@pytest.mark.parametrize("call", ["put", "get", "put after a failed epoch"])
def test_a_failed_call_keeps_no_buffer(
    start: Start, bucket: FaultyS3, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the garbage collector: the memory would live until it happens to run."""
    node = start()
    bucket.fault = of_blocks(503, "SlowDown") if call == "put" else lambda *_: (503, "SlowDown")
    if call == "put after a failed epoch":
        monkeypatch.setattr(node.epochs, "_read_at", float("-inf"))
    gc.collect()
    gc.disable()
    try:
        results: Sequence[Result] = []
        try:
            results = node.get() if call == "get" else node.put()
        except OSError as error:
            assert "503 Service Unavailable" in str(error)  # noqa: PT017
        close_once_unused(node.memory, node.store)
        assert all("503 Service Unavailable" in each for each in texts(results))
    finally:
        gc.enable()
