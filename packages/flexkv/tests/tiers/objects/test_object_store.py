# SPDX-License-Identifier: Apache-2.0
"""Blocks as objects, in memory and in a directory: what is found, and what of it is believed."""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'flexkv[objects]'")

import obstore
from obstore.store import LocalStore, MemoryStore

from flexkv.tiers import epochs
from flexkv.tiers.envelope import ENVELOPE_BYTES, seal
from flexkv.tiers.epochs import Epochs
from flexkv.tiers.job import Outcome, Result
from flexkv.tiers.objects import object_store as module
from flexkv.tiers.objects.object_store import ObjectBlocks, ObjectRecord, Requests
from flexkv.tiers.objects.open_objects import connect
from flexkv.tiers.questions import Found, Question
from flexkv.tiers.remote import NamedQuestion
from flexkv.types.errors import StoreSettingError
from packages.conftest import PATIENCE_SECONDS, Clock
from packages.inside_tiers import requests_of

FINGERPRINT = "f" * 32
SLOT = 4096
HUGE = 256 << 20
DONE, MISSING, DAMAGED = Outcome.DONE, Outcome.MISSING, Outcome.DAMAGED


def names(text: str) -> list[bytes]:
    return [each.encode() * 32 for each in text]


def content(key: bytes, size: int = SLOT) -> bytes:
    return (key * size)[:size]


class Node:
    """A store of blocks, and memory for them."""

    def __init__(self, store: Any, slot: int = SLOT, fingerprint: str = FINGERPRINT) -> None:
        requests = Requests(store, PATIENCE_SECONDS)
        self.blocks = ObjectBlocks(requests)
        self.epochs = Epochs(ObjectRecord(requests, fingerprint))
        self.epoch = self.epochs.open()
        self._fingerprint = fingerprint
        self._slot = slot

    def buffers(self, count: int) -> list[memoryview]:
        memory = memoryview(mmap.mmap(-1, max(1, count) * self._slot))
        return [memory[i * self._slot : (i + 1) * self._slot] for i in range(count)]

    def put(self, text: str) -> Sequence[Result]:
        keys, buffers = names(text), self.buffers(len(text))
        for key, buffer in zip(keys, buffers, strict=True):
            buffer[:] = content(key, self._slot)
        return self.blocks.put(self.named(keys), buffers)

    def get(self, text: str) -> Sequence[Result]:
        """The outcome of each block; the bytes of all that are DONE were right."""
        keys, buffers = names(text), self.buffers(len(text))
        outcomes = self.blocks.get(self.named(keys), buffers)
        for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
            assert outcome is not DONE or bytes(buffer) == content(key, self._slot)
        return outcomes

    def find(self, text: str, behind: str = "") -> Sequence[bool]:
        """The answer to one question; raises why there is none."""
        return self.ask(Question(names(text), names(behind)))

    def ask(self, question: Question) -> Sequence[bool]:
        (answer,) = self.answers(question)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def answers(self, *questions: Question) -> list[Found]:
        """The answers to questions of one call."""
        answers: dict[int, Found] = {}
        self.blocks.find(self.named_questions(*questions), answers.__setitem__)
        return [answers[number] for number in range(len(questions))]

    def named(self, keys: Sequence[bytes]) -> list[str]:
        """Names of blocks, as a tier makes them."""
        folder = f"{self.blocks.prefix}/{self._fingerprint}/{self.epochs.folder(self.epoch)}"
        return [f"{folder}/{key.hex()}" for key in keys]

    def named_questions(self, *questions: Question) -> list[NamedQuestion]:
        return [(self.named(each.keys), self.named(each.scattered)) for each in questions]

    def name(self, key: str) -> str:
        return self.named(names(key))[0]


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path)


Start = Callable[..., Node]


@pytest.fixture
def start(store: Any, at_end: ExitStack) -> Start:
    def make(**options: Any) -> Node:
        node = Node(store, **options)
        at_end.callback(node.blocks.close)
        return node

    return make


def test_a_write_ends_when_no_block_is_read_any_more(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the error of one block: memory that is used for other blocks afterwards would be
    sealed under the names of the others."""
    node = Node(store)
    keys, buffers = names("ab"), node.buffers(2)
    for key, buffer in zip(keys, buffers, strict=True):
        buffer[:] = content(key)
    reused = threading.Event()

    def seal_late(name: bytes, block: memoryview) -> bytes:
        if name.endswith(keys[0].hex().encode()):
            raise RuntimeError("can't start new thread")
        reused.wait(0.5)  # in vain if the write waits for it
        return seal(name, block)

    monkeypatch.setattr(module, "seal", seal_late)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        node.blocks.put(node.named(keys), buffers)
    buffers[1][:] = content(b"of another block")
    reused.set()
    while asyncio.all_tasks(requests_of(node.blocks)._loop):
        time.sleep(0.001)
    assert node.get("ab") == [MISSING, DONE]


def test_what_one_node_wrote_another_finds_and_reads(start: Start) -> None:
    one, other = start(), start()
    assert one.put("abc") == [DONE] * 3
    assert other.find("abcx") == [True, True, True, False]
    assert other.get("axc") == [DONE, MISSING, DONE]


def test_what_is_there_is_not_sent_again(
    start: Start, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = start(), start()
    one.put("ab")
    before = obstore.head(store, one.name("a"))["e_tag"]
    sent: list[str] = []
    put = requests_of(other.blocks).put

    async def count(name: str, *args: Any, **options: Any) -> bool:
        sent.append(name)
        return await put(name, *args, **options)

    monkeypatch.setattr(requests_of(other.blocks), "put", count)
    assert other.put("abc") == [DONE] * 3
    assert sent == [other.name("c")]
    assert obstore.head(store, one.name("a"))["e_tag"] == before


def test_blocks_of_other_models_are_not_found(start: Start) -> None:
    start(fingerprint="0" * 32).put("a")
    assert start().find("a") == [False]


def test_a_large_block_is_uploaded_in_parts(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MULTIPART_BYTES", 1 << 20)
    monkeypatch.setattr(module, "_PART_BYTES", 1 << 20)
    node = start(slot=3 << 20)
    assert node.put("a") == [DONE]
    assert start(slot=3 << 20).get("a") == [DONE]


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[: ENVELOPE_BYTES // 2],
        lambda data: b"",
        lambda data: (
            seal(b"another name", memoryview(data)[ENVELOPE_BYTES:]) + data[ENVELOPE_BYTES:]
        ),
    ],
    ids=["flipped", "cut", "longer", "half an envelope", "empty", "another's"],
)
def test_a_wrong_object_is_a_miss_and_is_overwritten(
    start: Start, store: Any, harm: Callable[[bytes], bytes]
) -> None:
    node = start()
    node.put("ab")
    name = node.name("a")
    obstore.put(store, name, harm(bytes(obstore.get(store, name).bytes())))
    assert node.get("ab") == [DAMAGED, DONE]
    assert node.find("a") == [False]
    assert node.put("a") == [DONE]
    assert node.find("a") == [True]
    assert start().get("ab") == [DONE, DONE]


def test_a_block_of_another_length_is_damaged(start: Start) -> None:
    start(slot=2 * SLOT).put("a")
    assert start().get("a") == [DAMAGED]


def test_of_a_huge_object_nothing_is_read(tmp_path: Path) -> None:
    """Whoever can write to the bucket could otherwise take all memory of the engine's machine."""
    node = Node(LocalStore(tmp_path))
    try:
        node.put("ab")
        os.truncate(tmp_path / node.name("a"), HUGE)
        Path("/proc/self/clear_refs").write_text("5")  # from here on VmHWM counts, see proc(5)
        before = peak_bytes()
        assert node.get("ab") == [DAMAGED, DONE]
        assert peak_bytes() < before + HUGE // 2
        assert node.put("a") == [DONE]
        assert node.get("a") == [DONE]
    finally:
        node.blocks.close()


def peak_bytes() -> int:
    """The most memory that this process has taken."""
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


def test_a_record_that_is_too_long_is_no_record(tmp_path: Path) -> None:
    node = Node(LocalStore(tmp_path))
    node.blocks.close()
    with (tmp_path / "epochs" / FINGERPRINT).open("ab") as record:
        record.truncate(1 << 20)
    with pytest.raises(OSError, match="the record of the epoch is not one"):
        Node(LocalStore(tmp_path))


def count_questions(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that the node asks about from now on."""
    asked: list[str] = []
    has = requests_of(node.blocks).has

    async def count(name: str) -> bool:
        asked.append(name)
        return await has(name)

    monkeypatch.setattr(requests_of(node.blocks), "has", count)
    return asked


@pytest.mark.parametrize("missed", [False, True], ids=["after a hit", "after a miss"])
@pytest.mark.parametrize("there", [0, 1, 15, 16, 17, 99, 100])
def test_few_requests_tell_how_far_a_prefix_is_there(
    start: Start, monkeypatch: pytest.MonkeyPatch, there: int, missed: bool
) -> None:
    node = start()
    keys = [bytes([i]) * 32 for i in range(100)]
    node.blocks.put(node.named(keys[:there]), node.buffers(there))
    if missed:
        assert node.find("x") == [False]
    asked = count_questions(node, monkeypatch)
    assert node.ask(Question(keys)) == [i < there for i in range(100)]
    assert len(asked) <= 2 * module.PROBES + missed


def test_blocks_with_gaps_are_asked_about_one_by_one_behind_a_prefix_that_is_there(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = start(), start()
    for text in ("abc", "x", "z"):
        one.put(text)
    assert other.find("abcd", "wxyz") == [True] * 3 + [False, False, True, False, True]
    assert other.find("", "wz") == [False, True]
    asked = count_questions(other, monkeypatch)
    assert other.find("q", "xz") == [False] * 3
    assert asked == [other.name("q")]


def test_questions_of_one_call_do_not_wait_for_each_other(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = start(), start()
    one.put("ab")
    has = requests_of(other.blocks).has
    answered = asyncio.Event()
    answers: dict[int, Found] = {}

    async def has_late(name: str) -> bool:
        if name == other.name("x"):
            await answered.wait()
        return await has(name)

    def answer(number: int, found: Found) -> None:
        answers[number] = found
        if len(answers) == 2:
            answered.set()

    monkeypatch.setattr(requests_of(other.blocks), "has", has_late)
    questions = [Question(names(text)) for text in ("xy", "abz", "q")]
    other.blocks.find(other.named_questions(*questions), answer)
    assert sorted(answers) == [0, 1, 2]
    assert answers == {0: [False] * 2, 1: [True, True, False], 2: [False]}
    assert list(answers)[-1] == 0


def test_of_the_questions_of_one_call_only_those_fail_that_the_store_does_not_answer(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start()
    node.put("a")
    has = requests_of(node.blocks).has

    async def has_or_fail(name: str) -> bool:
        if name == node.name("x"):
            raise module.StoreError("slow down")
        return await has(name)

    monkeypatch.setattr(requests_of(node.blocks), "has", has_or_fail)
    first, failed, last = node.answers(*(Question(names(text)) for text in "axb"))
    assert (first, last) == ([True], [False])
    assert str(failed) == "slow down"


def test_questions_do_not_wait_for_reads(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    node = start()
    node.put("a")
    monkeypatch.setattr(requests_of(node.blocks), "_free", asyncio.Semaphore(0))
    assert node.find("ab") == [True, False]


def test_misses_in_a_row_take_a_request_each(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    node = start()
    assert node.find("abcdefgh") == [False] * 8
    asked = count_questions(node, monkeypatch)
    for text in ("ijklmnop", "qrstuvwx"):
        assert node.find(text) == [False] * 8
    assert len(asked) == 2


def test_blocks_are_written_with_one_question_if_the_first_is_not_there(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start()
    asked = count_questions(node, monkeypatch)
    assert node.put("abcd") == [DONE] * 4
    assert len(asked) == 1
    assert start().get("abcd") == [DONE] * 4


def test_a_block_behind_an_absent_one_stays_as_it_is(start: Start, store: Any) -> None:
    one, other = start(), start()
    one.put("b")
    before = obstore.head(store, one.name("b"))["e_tag"]
    assert other.put("ab") == [DONE] * 2
    assert obstore.head(store, one.name("b"))["e_tag"] == before
    assert other.get("ab") == [DONE] * 2


def test_after_a_reset_elsewhere_those_of_the_epoch_go_on_without_what_was_before(
    start: Start, monkeypatch: pytest.MonkeyPatch, clock: Clock, store: Any
) -> None:
    monkeypatch.setattr(epochs, "time", clock)
    one, other, third = start(), start(), start()
    one.put("a")
    one.epochs.renew()
    clock.skip(epochs.FRESH_SECONDS)
    assert other.find("a") == [False]
    assert other.get("a") == [MISSING]
    assert other.put("bc") == [DONE] * 2
    assert third.get("b") == [DONE]
    assert start().find("bc") == [False, False]


def test_a_request_that_hangs_fails_in_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    node = start()

    read = obstore.get_async

    async def hang(store: Any, name: str, *args: object) -> Any:
        if name.startswith("epochs/"):
            return await read(store, name)
        return await asyncio.Event().wait()

    monkeypatch.setattr(requests_of(node.blocks), "_timeout_seconds", 0.05)
    monkeypatch.setattr(obstore, "get_async", hang)
    monkeypatch.setattr(obstore, "head_async", hang)
    for results in (node.get("ab"), node.put("ab")):
        assert [str(each) for each in results] == [
            "the object store did not answer within 0.05 s"
        ] * 2
    with pytest.raises(module.StoreError, match=r"within 0\.05 s"):
        node.find("a")


def test_plain_http_needs_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    with pytest.raises(StoreSettingError, match=r"AWS_ENDPOINT_URL.*AWS_ALLOW_HTTP=true"):
        connect("s3://bucket", 1.0)


def test_a_url_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StoreSettingError, match=r"'az://container'.*allowed"):
        connect("az://container", 1.0)
