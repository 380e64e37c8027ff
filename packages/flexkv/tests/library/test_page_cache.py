# SPDX-License-Identifier: Apache-2.0
"""`open_cache`: pages of numpy under keys, in host memory and on disk, without an engine.

Most tests run twice: over memory of the process's own, and over that of the node's service.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from faulty_s3 import URL, FaultyS3
from resident import resident

import flexkv
from flexkv import ConfigError, DiskError, FlexKVError, KVLayout, PageCache, TensorView
from flexkv.types.mover import Direction, Status
from flexkv_kernels import HostMemory
from packages.flexkv.tests.library.pages import KEYS, PAGES, SLOT_GB, Pages
from packages.flexkv.tests.service.served import Service
from packages.patience import wait_until


@pytest.fixture
def pages() -> Pages:
    return Pages()


class Node:
    """The services of one test, each with other sizes of memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._services: dict[tuple[int, Path | None], Service] = {}

    def settings(self, slots: int, disk: Path | None) -> dict[str, object]:
        """Those of a program that uses a service with this memory and disk."""
        if (slots, disk) not in self._services:
            self.close()  # each owns the disk
            folder = self._folder / f"node {len(self._services)}"
            folder.mkdir()
            sizes = own_settings(slots, disk)
            if disk is not None:
                sizes["ssd_cache_dir"] = (str(disk),)
            self._services[slots, disk] = Service(folder, slots, **sizes)
        return {"service": self._services[slots, disk].root}

    def close(self) -> None:
        for service in self._services.values():
            service.close(60.0)


nodes: list[Node] = []
"""That of the test that runs, if its caches use the node's service."""


@pytest.fixture(params=["own", "served"], autouse=True)
def node(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    if request.param == "served":
        nodes.append(Node(tmp_path_factory.mktemp("node")))
    yield
    while nodes:
        nodes.pop().close()


own = pytest.mark.parametrize("node", ["own"], indirect=True)
"""Of tests of what a process has that uses no service."""


def open_cache(config: Any, layout: KVLayout, **more: Any) -> PageCache:
    if nodes:
        more.setdefault("identity", "m")
    return flexkv.open_cache(config, layout, **more)


def own_settings(slots: int, disk: Path | None) -> dict[str, Any]:
    host: dict[str, object] = {"cpu_cache_gb": slots * SLOT_GB, "ssd_timeout_seconds": 60.0}
    below = {"ssd_cache_gb": 256 * SLOT_GB, "ssd_cache_dir": str(disk)}
    return host if disk is None else host | below


def settings(slots: int = 16, disk: Path | None = None) -> dict[str, object]:
    return nodes[-1].settings(slots, disk) if nodes else own_settings(slots, disk)


def fill(pages: Pages, cache: PageCache, count: int, start: int = 0) -> int:
    """Store blocks `start` to `count` from the pages of their numbers, which are zeros then."""
    for number in range(start, count):
        pages.write(number, number + 1)
    after = KEYS[start - 1] if start else None
    stored = cache.store(KEYS[start:count], range(start, count), after)
    for tensor in pages.tensors:
        tensor[:] = 0
    return stored


def test_what_was_stored_is_loaded_into_other_pages(pages: Pages) -> None:
    with open_cache(settings(), pages.layout) as cache:
        assert cache.lookup(KEYS[:3]) == 0
        assert fill(pages, cache, 3) == 3
        assert cache.lookup(KEYS[:5]) == 3
        assert cache.load(KEYS[:5], [9, 20, 11, 12, 13]) == 3
        assert pages.held() == {9: 1, 20: 2, 11: 3}


def test_a_prefix_is_loaded_from_any_block_on(pages: Pages) -> None:
    with open_cache(settings(), pages.layout) as cache:
        fill(pages, cache, 4)
        assert cache.lookup(KEYS[2:5]) == 2
        assert cache.load(KEYS[2:4], [0, 1]) == 2
        assert pages.held() == {0: 3, 1: 4}


def test_only_new_blocks_are_copied(pages: Pages) -> None:
    with open_cache(settings(), pages.layout) as cache:
        fill(pages, cache, 2)
        assert cache.store(KEYS[:3], [5, 6, 7]) == 1  # pages 5 and 6 hold zeros
        assert cache.load(KEYS[:2], [0, 1]) == 2
        assert pages.held() == {0: 1, 1: 2}


def test_a_block_is_stored_behind_the_one_that_it_builds_on(pages: Pages) -> None:
    with open_cache(settings(), pages.layout) as cache:
        fill(pages, cache, 2)
        assert cache.store([KEYS[4]], [0], after=KEYS[3]) == 0
        assert cache.lookup([KEYS[4]]) == 0
        assert fill(pages, cache, 4, start=2) == 2
        assert cache.lookup(KEYS[:6]) == 4


def test_the_end_of_a_prefix_leaves_first_and_what_is_found_is_right(pages: Pages) -> None:
    with open_cache(settings(slots=6), pages.layout) as cache:
        fill(pages, cache, 4)
        others = [b"other %d" % i for i in range(4)]
        assert cache.store(others, range(4)) == 4
        found = cache.lookup(KEYS[:4])
        assert 0 < found < 4
        assert cache.load(KEYS[:4], range(20, 24)) == found
        assert pages.held() == {20 + i: i + 1 for i in range(found)}


def test_blocks_on_disk_are_found_after_a_restart(pages: Pages, tmp_path: Path) -> None:
    with open_cache(settings(disk=tmp_path), pages.layout, identity="model a") as cache:
        fill(pages, cache, 5)
    with open_cache(settings(disk=tmp_path), Pages().layout, identity="model b") as cache:
        assert cache.lookup(KEYS[:5]) == 0
    again = Pages()
    with open_cache(settings(disk=tmp_path), again.layout, identity=["model a"]) as cache:
        assert cache.lookup(KEYS[:7]) == 5
        assert cache.load(KEYS[:7], range(10, 17)) == 5
        assert again.held() == {10 + i: i + 1 for i in range(5)}


def test_more_is_loaded_from_disk_than_host_memory_holds(pages: Pages, tmp_path: Path) -> None:
    with open_cache(settings(disk=tmp_path), pages.layout, identity="m") as cache:
        for end in (6, 12):  # half of the memory may wait for the disk
            fill(pages, cache, end, start=end - 6)
            assert cache.flush(60.0)
    with open_cache(settings(slots=4, disk=tmp_path), pages.layout, identity="m") as cache:
        assert cache.cache.info.num_slots < 12
        assert cache.lookup(KEYS[:12]) == 12
        assert cache.load(KEYS[:12], range(12)) == 12
        assert pages.held() == {i: i + 1 for i in range(12)}


def test_the_longest_keys_are_whole_on_disk(pages: Pages, tmp_path: Path) -> None:
    one, other = b"k" * 95 + b"1", b"k" * 95 + b"2"
    pages.write(0, 7)
    with open_cache(settings(disk=tmp_path), pages.layout, identity="m") as cache:
        cache.store([one], [0])
        assert cache.flush(60.0)
    with open_cache(settings(disk=tmp_path), pages.layout, identity="m") as cache:
        assert cache.lookup([other]) == 0
        assert cache.load([one], [3]) == 1
        assert pages.read(3) == 7


def test_after_clear_nothing_is_found_now_or_after_a_restart(pages: Pages, tmp_path: Path) -> None:
    with open_cache(settings(disk=tmp_path), pages.layout, identity="m") as cache:
        fill(pages, cache, 3)
        cache.clear()
        assert cache.lookup(KEYS[:3]) == 0
        assert fill(pages, cache, 3) == 3
        assert cache.load(KEYS[:3], [0, 1, 2]) == 3
    with open_cache(settings(disk=tmp_path), pages.layout, identity="m") as cache:
        # Other programs keep what they share.
        assert cache.lookup(KEYS[:3]) == (3 if nodes else 0)


def test_numbers_of_pages_may_be_numpys(pages: Pages) -> None:
    pages.write(4, 1)
    with open_cache(settings(), pages.layout) as cache:
        assert cache.store(KEYS[:1], np.array([4], np.int32)) == 1
        assert cache.load(KEYS[:1], [np.uint64(5)]) == 1
        assert pages.read(5) == 1


@pytest.mark.parametrize(
    ("keys", "numbers", "error", "said"),
    [
        (b"key", [0], TypeError, "keys is b'key'; allowed: a list of keys"),
        (["key"], [0], TypeError, "key 0 is 'key'; allowed: bytes"),
        ([b""], [0], TypeError, "key 0 is b''; allowed: bytes, at least one"),
        ([b"a", b"k" * 97], [0, 1], ValueError, "key 1 has 97 bytes; allowed: up to 96"),
        ([b"a", b"a"], [0, 1], ValueError, "key 1, b'a', is a duplicate"),
        ([b"a", b"b"], [0], ValueError, "2 keys, but 1 pages; allowed: as many"),
        ([b"a"], [PAGES], ValueError, f"page {PAGES} is not in the layout; allowed: 0 to 31"),
        ([b"a"], [-1], ValueError, "page -1 is not in the layout"),
        ([b"a"], [1.0], TypeError, "'float' object"),
    ],
)
def test_bad_keys_and_pages_are_refused(
    pages: Pages, keys: Any, numbers: Any, error: type[Exception], said: str
) -> None:
    with open_cache(settings(), pages.layout) as cache:
        for call in (cache.store, cache.load, cache.begin_store, cache.begin_load):
            with pytest.raises(error) as raised:
                call(keys, numbers)
            assert said in str(raised.value)
        assert cache.cache.missing([b"a", b"key"]) == [0, 1]


def test_no_page_is_filled_twice(pages: Pages) -> None:
    with open_cache(settings(), pages.layout) as cache:
        fill(pages, cache, 2)
        with pytest.raises(ValueError, match=r"pages are \[3, 3\]; allowed: each page once"):
            cache.load(KEYS[:2], [3, 3])


@own
@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        ("cache.yaml", TypeError, "config is a str; allowed: a mapping of settings"),
        ({"cpu_cache": 1}, ConfigError, "unknown key 'cpu_cache' in open_cache"),
        ({"enable": False}, ConfigError, "enable is false (ENABLE_FLEXKV)"),
        (settings(disk=Path("/x")), ConfigError, "identity is empty and ssd_cache_gb, "),
        (settings(slots=0), ConfigError, "is not a valid cpu_cache_gb"),
        (settings() | {"service": "/s"}, ConfigError, "objects_url or service is set"),
    ],
)
def test_settings_that_make_no_cache_are_refused(
    pages: Pages, config: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as raised:
        open_cache(config, pages.layout)
    assert said in str(raised.value)


@own
def test_settings_may_be_read_before(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXKV_CPU_CACHE_GB", str(5 * SLOT_GB))
    with open_cache(flexkv.load_config(), pages.layout) as cache:
        assert cache.cache.info.num_slots == 5
    with open_cache(None, pages.layout) as cache:
        assert cache.cache.info.num_slots == 5


@own
def test_a_failed_start_leaves_nothing(pages: Pages, tmp_path: Path) -> None:
    with open_cache(settings(disk=tmp_path), pages.layout, identity="m"):
        before = mapped_arenas()
        (tmp_path / "file").touch()
        with pytest.raises(DiskError, match="Not a directory") as raised:
            open_cache(settings(disk=tmp_path / "file"), pages.layout, identity="m")
        assert mapped_arenas() == before  # though the traceback keeps the arena's object
        del raised


@own
def test_without_the_kernels_the_error_says_what_is_missing(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flexkv_kernels.host_memory", None)
    with pytest.raises(FlexKVError, match="pip install flexkv-kernels"):
        open_cache(settings(), pages.layout)


@own
def test_an_exception_in_the_block_closes_the_cache(pages: Pages) -> None:
    before = mapped_arenas()
    cache = open_cache(settings(), pages.layout)

    def use() -> None:
        with cache:
            assert mapped_arenas() == before + 1
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert mapped_arenas() == before
    cache.close()
    others = (lambda: cache.lookup(KEYS), lambda: cache.stored_keys(KEYS))
    for call in (cache.flush, cache.clear, cache.__enter__, *others):
        with pytest.raises(FlexKVError, match="the cache is closed; allowed: a cache that is open"):
            call()


@own
def test_a_cache_that_nobody_holds_warns_and_frees_its_memory(pages: Pages) -> None:
    before = mapped_arenas()
    caches = [open_cache(settings(), pages.layout)]
    with pytest.warns(ResourceWarning, match="was not closed"):
        caches.clear()
    assert mapped_arenas() == before


@own
def test_host_memory_is_twice_the_layout_by_default(pages: Pages) -> None:
    rounds = [[b"%d %d" % (number, page) for page in range(PAGES)] for number in range(3)]
    with open_cache({}, pages.layout) as cache:
        for keys in rounds[:2]:
            assert cache.store(keys, pages=range(PAGES)) == PAGES
        assert [cache.lookup(keys) for keys in rounds[:2]] == [PAGES, PAGES]
        assert cache.store(rounds[2], pages=range(PAGES)) == PAGES
        found = sum(cache.lookup([key]) for keys in rounds for key in keys)
    assert found == 2 * PAGES


def test_arrays_live_as_long_as_a_cache_of_theirs() -> None:
    array = np.zeros((PAGES, 64), np.uint8)
    alive = weakref.ref(array)
    with open_cache(settings(), KVLayout.from_tensors([TensorView.of("a", array)], PAGES)):
        del array
        gc.collect()
        assert alive() is not None
    gc.collect()
    assert alive() is None


def test_threads_share_a_cache(pages: Pages) -> None:
    wrong: list[int] = []

    def use(first: int) -> None:
        mine = range(first, first + 8)
        for _ in range(20):
            cache.store([KEYS[i] for i in mine], mine)
            found = cache.load([KEYS[i] for i in mine], mine)
            wrong.extend(i for i in mine[:found] if pages.read(i) != i + 1)

    for number in range(PAGES):
        pages.write(number, number + 1)
    with open_cache(settings(slots=20), pages.layout) as cache:
        threads = [threading.Thread(target=use, args=(first,)) for first in range(0, PAGES, 8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


class Steered:
    """Host memory whose mover fails copies, refuses them, or makes them when somebody waits."""

    numa_node, _last = None, 0

    def __init__(self) -> None:
        self.fails = self.refuses = self.is_lazy = False
        self._kept: list[tuple[Any, ...]] = []

    def make_mover(self, *args: Any) -> Any:
        self._mover = HostMemory().make_mover(*args)
        return self

    def work_so_far(self) -> int:
        return 0

    def submit(
        self,
        direction: Direction,
        blocks: Sequence[int],
        offsets: Sequence[int],
        after: int,
        flag: int,
        **_: Any,
    ) -> int:
        if self.refuses:
            raise RuntimeError("the device has failed")
        if self.fails:
            ctypes.c_uint32.from_address(flag).value = Status.FAILED
            return 0
        if self.is_lazy:
            self._kept.append((direction, blocks, offsets, after, flag))
            return 0
        return self._mover.submit(direction, blocks, offsets, after, flag)

    def wait(self, ticket: int, timeout: float) -> Status:
        while self._kept:
            self._last = self._mover.submit(*self._kept.pop(0))
        return self._mover.wait(ticket or self._last, timeout)

    def close(self) -> None:
        self._mover.close()


def test_a_copy_that_fails_is_a_miss(pages: Pages) -> None:
    device = Steered()
    with open_cache(settings(), pages.layout, device=device) as cache:
        fill(pages, cache, 2)
        device.fails = True
        assert cache.store(KEYS[4:6], [4, 5]) == 0
        assert cache.load(KEYS[:2], [0, 1]) == 0
        device.fails = False
        if nodes:  # a block that an engine stores counts until the service knows that it failed
            wait_until(lambda: cache.lookup(KEYS[4:6]) == 0)
        assert cache.lookup(KEYS[4:6]) == 0
        # A block whose copy failed is not offered again, unless others use it, too.
        assert cache.lookup(KEYS[:2]) == (2 if nodes else 0)


def test_a_device_that_refuses_raises_and_nothing_is_found(pages: Pages) -> None:
    device = Steered()
    with open_cache(settings(), pages.layout, device=device) as cache:
        fill(pages, cache, 2)
        device.refuses = True
        with pytest.raises(RuntimeError, match="the device has failed"):
            cache.store(KEYS[4:5], [4])
        with pytest.raises(RuntimeError, match="the device has failed"):
            cache.load(KEYS[:2], [0, 1])
        device.refuses = False
        assert cache.lookup(KEYS[4:5]) == 0
        assert not cache.cache.status.under_way


def test_after_a_clear_that_failed_nothing_is_found(pages: Pages) -> None:
    def fail() -> None:
        raise RuntimeError("for the test")

    device = Steered()
    with open_cache(settings(), pages.layout, device=device) as cache:
        fill(pages, cache, 2)
        device.is_lazy = True
        copy = cache.begin_store(KEYS[2:3], [2])
        copy.stop = fail  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="for the test"):
            cache.clear()
        assert cache.lookup(KEYS[:2]) == 0
        del copy.stop
        cache.clear()
        copy.cancel()
        device.is_lazy = False
        assert fill(pages, cache, 2) == cache.lookup(KEYS[:2]) == 2


def test_a_copy_that_failed_keeps_its_error_and_not_the_calls_behind_it(pages: Pages) -> None:
    """Their buffers would keep the arena when the cache is closed."""

    class Buffer:
        pass

    made: list[weakref.ref[Buffer]] = []

    def fail() -> None:
        buffer = Buffer()
        made.append(weakref.ref(buffer))
        try:
            raise KeyError("of a tier")
        except KeyError:
            raise RuntimeError("the device has failed")  # noqa: B904

    with open_cache(settings(), pages.layout) as cache:
        copy = cache.begin_load(KEYS[:1], [0])
        copy.ended, copy._advance = False, fail  # type: ignore[method-assign]
        copy.advance()
        assert [each() for each in made] == [None]
        with pytest.raises(RuntimeError, match="the device has failed"):
            copy.wait()


@own
def test_a_busy_store_that_fails_keeps_no_memory(
    pages: Pages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the garbage collector: the memory would live until it happens to run."""
    pytest.importorskip("obstore", reason="obstore is missing: pip install 'flexkv[objects]'")
    bucket = FaultyS3(monkeypatch)
    gc.collect()
    gc.disable()
    try:
        cache = open_cache(settings() | {"objects_url": URL}, pages.layout, identity="m")
        bucket.fault = lambda *_: (503, "SlowDown")
        arena = cache._session.arena
        fill(pages, cache, 8)
        cache.lookup(KEYS)
        cache.close(flush_seconds=0.0)
        assert not resident(arena.address)
    finally:
        gc.enable()
        bucket.close()
    assert "of the arena's" not in caplog.text


def test_close_frees_the_memory_even_if_the_last_poll_fails(
    pages: Pages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> NoReturn:
        raise OSError("the poll has failed")

    cache = open_cache(settings(), pages.layout)
    arena = cache._session.arena
    fill(pages, cache, 2)
    cache.begin_load(KEYS[:2], [0, 1])
    monkeypatch.setattr(cache.cache, "poll", fail)
    cache.close()
    assert not resident(arena.address)
    assert caplog.text.count("the poll has failed") >= 1


def test_waiting_has_an_end_and_cancelling_waits_for_the_copy(pages: Pages) -> None:
    device = Steered()
    with open_cache(settings(), pages.layout, device=device) as cache:
        fill(pages, cache, 2)
        device.is_lazy = True
        copy = cache.begin_load(KEYS[:2], [0, 1])
        assert not copy.done
        with pytest.raises(TimeoutError):
            copy.wait(timeout=0.0)
        assert len(cache.cache.status.under_way) == 1
        copy.cancel()
        assert copy.done
        assert not cache.cache.status.under_way
        assert pages.held() == {0: 1, 1: 2}


def test_a_copy_begun_is_whole_when_it_was_waited_for(pages: Pages) -> None:
    with open_cache(settings(), pages.layout) as cache:
        pages.write(0, 1)
        assert cache.begin_store(KEYS[:1], [0]).wait(timeout=60.0) == 1
        copy = cache.begin_load(KEYS[:1], [1])
        assert copy.wait(timeout=60.0) == 1
        assert copy.done
        assert pages.read(1) == 1


def test_stores_that_were_begun_are_kept_by_close(pages: Pages, tmp_path: Path) -> None:
    device = Steered()
    device.is_lazy = True
    pages.write(0, 1)
    with open_cache(settings(disk=tmp_path), pages.layout, identity="m", device=device) as cache:
        cache.begin_store(KEYS[:1], [0])
    with open_cache(settings(disk=tmp_path), pages.layout, identity="m") as cache:
        if nodes:  # the service may publish the block only now
            wait_until(lambda: cache.lookup(KEYS[:1]) == 1)
        assert cache.load(KEYS[:1], [1]) == 1
        assert pages.read(1) == 1


def test_copies_stay_on_the_processors_of_the_process(pages: Pages) -> None:
    before = os.sched_getaffinity(0)
    one = {min(before)}
    known = set(os.listdir("/proc/self/task"))
    os.sched_setaffinity(0, one)
    try:
        with open_cache(settings(), pages.layout):
            allowed = []
            for task in set(os.listdir("/proc/self/task")) - known:
                with contextlib.suppress(ProcessLookupError):  # it filled the arena
                    allowed.append(os.sched_getaffinity(int(task)))
            assert allowed
            assert all(each == one for each in allowed)
    finally:
        os.sched_setaffinity(0, before)


def mapped_arenas() -> int:
    """Arenas that are mapped in this process, but for those that earlier tests have left."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="ascii", errors="replace")
    return sum("memfd:flexkv" in line for line in maps.splitlines())


@own
def test_settings_of_a_mapping_type(pages: Pages) -> None:
    class Custom(Mapping[str, object]):
        def __getitem__(self, name: str) -> object:
            return settings()[name]

        def __iter__(self) -> Any:
            return iter(settings())

        def __len__(self) -> int:
            return len(settings())

    with open_cache(Custom(), pages.layout) as cache:
        assert cache.cache.info.num_slots == 16
