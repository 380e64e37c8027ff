# SPDX-License-Identifier: Apache-2.0
"""Pages of host pools over real files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hicache.fake_pools import MAKERS, PAGES, MhaPool, MlaPool, fill, tokens_of

from flexkv.engine.boundary import ErrorBoundary
from flexkv.service.pool_sizes import PoolFile, PoolSize
from flexkv.service.private_service import FLUSH_SECONDS
from flexkv.service.server import NodeServer
from flexkv.service.state import state_of
from flexkv.settings import SETTINGS, CacheConfig
from flexkv.types.errors import ConfigError
from flexkv_sglang.hicache.epochs import engine_name, epoch_of
from flexkv_sglang.hicache.place import Place
from flexkv_sglang.hicache.pool_cache import PoolCache
from flexkv_sglang.hicache.stores import PoolStores
from packages.flexkv.tests.service.served import Service

ONE = Place(tp=(0, 1), pp=(0, 1), cp=(0, 1), replicated=False, copies=1)
MODEL = ("a model",)
KEYS = [f"{number:064x}" for number in range(PAGES)]


SLOTS, DISK_SLOTS = 32, 235
"""Pages that the memory and the disk of a pool have room for."""


def root_of(root: Path) -> str:
    """The directory of the service of `stores`."""
    return str(root / "run" / f"hicache-{engine_name()}")


def rank(number: int, replicated: bool = False) -> Place:
    return Place(tp=(number, 2), pp=(0, 1), cp=(0, 1), replicated=replicated, copies=1)


services: list[Service] = []


@contextmanager
def served(root: Path) -> Iterator[str]:
    """The directory of a service of the node."""
    services.append(Service(root, SLOTS))
    yield services[-1].root
    services.pop().close()


class ServiceThread:
    """A private service in a thread, with the calls of `Popen` that `PrivateService` makes. A
    process would take half a second to import Python modules."""

    def __init__(self, root: str, config: CacheConfig, sizes: Mapping[str, PoolSize]) -> None:
        pools = PoolFile("", next(iter(sizes.values())), sizes)
        self._server = NodeServer(root, config, pools=pools)
        self._root = root
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._server.run()
        finally:
            self._server.close(FLUSH_SECONDS)
            shutil.rmtree(self._root, ignore_errors=True)

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def terminate(self) -> None:
        self._server.stop()

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired(self._root, timeout or 0.0)
        return 0


@pytest.fixture(autouse=True)
def _another_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The private service is a thread, unless a test asks for `process`."""
    epoch_of.cache_clear()
    if "process" not in request.fixturenames:
        monkeypatch.setattr("flexkv.service.private_service._start", ServiceThread)


@pytest.fixture
def process() -> None:
    """The private service is a process, as for users."""


@contextmanager
def stores(
    root: Path, pool: Any, place: Place = ONE, model: Any = MODEL, **more: Any
) -> Iterator[PoolStores]:
    """Stores with 1 MiB of disk and 128 KiB of memory for each pool, all of one size; `more` are
    further pools and settings."""
    others = {name: more.pop(name) for name in list(more) if name not in SETTINGS}
    pools = {"kv": pool, **others}
    gib = len(pools) * place.owners("kv") / 1024
    settings = {
        "cpu_cache_gb": gib / 8,
        "ssd_cache_gb": gib,
        "ssd_cache_dir": (str(root / "disk"),),
        "ssd_timeout_seconds": 60.0,
        "ssd_in_use": "error",
        "runtime_dir": str(root / "run"),
    }
    config = CacheConfig(**settings | more)
    made = PoolStores(config, place, model, ErrorBoundary())
    for name, each in pools.items():
        made.add(name, each)
    made.open()
    try:
        yield made
    finally:
        made.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.01)


def store(kept: PoolStores, keys: list[str], before: Sequence[str] = ()) -> None:
    """Store a page, which waits until the disk has written enough of those in memory."""
    assert kept.set("kv", keys, tokens_of(3), before) == [True]


def full(kind: str = "page_first", seed: int = 0) -> Any:
    pool = MAKERS[kind]()
    fill(pool, seed)
    return pool


@pytest.mark.usefixtures("process")
def test_pages_of_a_service_in_a_process_come_back(tmp_path: Path) -> None:
    assert_pages_come_back(tmp_path, "page_first")


@pytest.mark.parametrize("kind", MAKERS)
def test_pages_come_back_after_a_restart_to_other_places(tmp_path: Path, kind: str) -> None:
    assert_pages_come_back(tmp_path, kind)


def assert_pages_come_back(tmp_path: Path, kind: str) -> None:
    before, after = full(kind), MAKERS[kind]()
    with stores(tmp_path, before) as first:
        assert first.set("kv", KEYS[:3], tokens_of(4, 7, 2)) == [True] * 3
    with stores(tmp_path, after) as second:
        assert second.contains("kv", KEYS[:4]) == [True, True, True, False]
        assert second.get("kv", KEYS[:3], tokens_of(0, 1, 9)) == [True] * 3
    for there, here in ((0, 4), (1, 7), (9, 2)):
        assert torch.equal(after.page(there), before.page(here))
    assert after.page(3).count_nonzero() == 0


def test_pages_that_a_service_which_hangs_was_told_of_do_not_count(tmp_path: Path) -> None:
    with served(tmp_path) as root, stores(tmp_path, full(), service=root) as kept:
        assert kept.set("kv", KEYS[:1], tokens_of(0)) == [True]
        services[-1].stop()
        assert kept.set("kv", KEYS[:3], tokens_of(0, 1, 2)) == [True, False, False]
        assert kept.contains("kv", KEYS[:3]) == [True, False, False]


def test_a_read_stops_at_the_first_page_that_is_missing(tmp_path: Path) -> None:
    pool = full()
    with stores(tmp_path, pool) as kept:
        kept.set("kv", [KEYS[0]], tokens_of(0))
        kept.set("kv", [KEYS[2]], tokens_of(2))
        assert kept.get("kv", KEYS[:3], tokens_of(3, 4, 5)) == [True, False, False]


@pytest.mark.parametrize("changed", ["data", "table"])
def test_a_wrong_byte_on_disk_is_a_miss(tmp_path: Path, changed: str) -> None:
    pool, after = full(), MhaPool("page_first")
    with stores(tmp_path, pool) as first:
        first.set("kv", KEYS, tokens_of(*range(PAGES)))
    (path,) = tmp_path.rglob("slab-00000" if changed == "data" else "table")
    content = bytearray(path.read_bytes())
    spots = range(100, len(content), 4096) if changed == "data" else range(8192, len(content), 64)
    for spot in spots:
        content[spot] ^= 1
    path.write_bytes(content)
    with stores(tmp_path, after) as second:
        assert second.get("kv", KEYS, tokens_of(*range(PAGES))) == [False] * PAGES
        assert second.contains("kv", KEYS)[0] is False
    assert after.kv_buffer.count_nonzero() == 0


@pytest.mark.parametrize(
    "change",
    [
        {"model": ("another model",)},
        {"pool": MhaPool("layer_first")},
        {"place": rank(0)},
    ],
)
def test_other_pages_are_not_found(tmp_path: Path, change: dict[str, Any]) -> None:
    with stores(tmp_path, full()) as first:
        first.set("kv", KEYS[:1], tokens_of(1))
    with stores(tmp_path, change.pop("pool", full()), **change) as second:
        assert second.contains("kv", KEYS[:1]) == [False]


def test_ranks_keep_their_pages_beside_each_other(tmp_path: Path) -> None:
    pools = [full(seed=number) for number in (1, 2)]
    back = [MhaPool("page_first") for _ in pools]
    with stores(tmp_path, pools[0], rank(0)) as zero, stores(tmp_path, pools[1], rank(1)) as one:
        for kept in (zero, one):
            assert kept.set("kv", KEYS[:2], tokens_of(0, 1)) == [True, True]
        sizes = [pool.slots for pool in state_of(root_of(tmp_path)).pools]
        assert sizes == [SLOTS, SLOTS]  # of twice the space in all
    with stores(tmp_path, back[0], rank(0)) as zero, stores(tmp_path, back[1], rank(1)) as one:
        for kept, after, before in zip((zero, one), back, pools, strict=True):
            assert kept.get("kv", KEYS[:2], tokens_of(0, 1)) == [True, True]
            assert torch.equal(after.page(1), before.page(1))


def test_ranks_with_the_same_pages_read_what_one_has_written(tmp_path: Path) -> None:
    written, read = full("mla"), MlaPool()
    with (
        stores(tmp_path, written, rank(0, replicated=True)) as zero,
        stores(tmp_path, read, rank(1, replicated=True)) as one,
    ):
        assert one.contains("kv", KEYS[:1]) == [False]
        assert zero.set("kv", KEYS[:2], tokens_of(3, 4)) == [True, True]
        assert one.contains("kv", KEYS[:2]) == [True, True]
        assert one.get("kv", KEYS[:2], tokens_of(1, 0)) == [True, True]
        assert torch.equal(read.page(1), written.page(3))
    assert len(list((tmp_path / "disk").iterdir())) == 1


RANK = """
import sys
from pathlib import Path
from hicache.test_stores import KEYS, full, rank, stores, tokens_of
with stores(Path(sys.argv[1]), full("mla"), rank(int(sys.argv[2]), replicated=True)) as kept:
    print("open", flush=True)
    for line in sys.stdin:
        call, _, count = line.strip().partition(" ")
        if call == "clear":
            kept.clear()
            print("cleared", flush=True)
            continue
        pages = tokens_of(*range(int(count)))
        print(sum(getattr(kept, call)("kv", KEYS[: int(count)], pages)), flush=True)
"""


def test_ranks_that_start_at_once_share_a_service(tmp_path: Path) -> None:
    """As SGLang starts them: processes of one parent."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        )
        for number in range(2)
    ]

    def said(number: int, line: str = "") -> str:
        process = ranks[number]
        assert process.stdin is not None
        assert process.stdout is not None
        if line:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        return process.stdout.readline().strip()

    try:
        assert [said(0), said(1)] == ["open", "open"]
        (root,) = (tmp_path / "run").glob("hicache-*")
        assert said(0, "set 3") == "3"
        assert said(1, "get 4") == "3"
        assert [said(0, "clear"), said(1, "clear")] == ["cleared", "cleared"]
        assert said(1, "get 4") == "0"
        assert said(0, "set 2") == "2"
        assert said(1, "get 4") == "2", "after a clear, too"
        for process in ranks:
            process.kill()
            process.wait()
        until(lambda: not root.exists())
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.usefixtures("process")
def test_two_servers_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stores(tmp_path, full()) as one:
        monkeypatch.setattr("flexkv_sglang.hicache.stores.engine_name", lambda: "another")
        with stores(tmp_path, full()) as two:
            assert one.set("kv", KEYS[:1], tokens_of(0)) == [True]
            assert two.contains("kv", KEYS[:1]) == [False]
            assert two.set("kv", KEYS[:1], tokens_of(0)) == [True], "it has memory of its own"
    assert len(list((tmp_path / "disk").iterdir())) == 1


def test_copies_of_an_engine_share_its_pages(tmp_path: Path) -> None:
    copy = Place(tp=(0, 1), pp=(0, 1), cp=(0, 1), replicated=False, copies=2)
    with stores(tmp_path, full(), copy) as one, stores(tmp_path, full(), copy) as two:
        assert one.set("kv", KEYS[:1], tokens_of(0)) == [True]
        assert two.contains("kv", KEYS[:1]) == [True]


def test_pools_have_their_own_pages_under_one_key(tmp_path: Path) -> None:
    kv, state = full(), full("page_head", seed=5)
    with stores(tmp_path, kv, mamba=state) as kept:
        assert kept.set("kv", KEYS[:1], tokens_of(0)) == [True]
        assert kept.contains("mamba", KEYS[:1]) == [False]
        assert kept.set("mamba", KEYS[:1], tokens_of(3)) == [True]
        assert kept.get("mamba", KEYS[:1], tokens_of(4)) == [True]
    assert torch.equal(state.page(4), state.page(3))


@pytest.mark.parametrize("call", ["contains", "get", "set"])
def test_a_prefix_that_sglang_has_itself_stays_on_disk(tmp_path: Path, call: str) -> None:
    """A system prompt that every request has, and that SGLang therefore never reads again."""
    with stores(tmp_path, full()) as kept:
        system, turns = KEYS[:3], 2 * DISK_SLOTS
        assert kept.set("kv", system, tokens_of(0, 1, 2)) == [True] * 3
        for number in range(100, 100 + turns):
            own = [f"{number:064x}"]
            before = system if call == "set" else ()
            store(kept, own, before)
            if call == "contains":
                assert kept.contains("kv", own, system) == [True]
            elif call == "get":
                assert kept.get("kv", own, tokens_of(4), system) == [True]
        assert kept.contains("kv", system) == [True] * 3


@pytest.mark.parametrize("call", ["get", "set"])
def test_a_prefix_leaves_the_disk_from_its_end(tmp_path: Path, call: str) -> None:
    """SGLang passes a long prefix in several calls."""
    with stores(tmp_path, full()) as kept:
        prefix = [f"{number:064x}" for number in range(100, 108)]
        pages = tokens_of(*range(4))
        for calls in ("set", call):
            for first in (0, 4):
                part, before = prefix[first : first + 4], prefix[:first]
                assert getattr(kept, calls)("kv", part, pages, before) == [True] * 4
        for number in range(1000, 1000 + DISK_SLOTS - 4):
            store(kept, [f"{number:064x}"])
        until(lambda: kept.contains("kv", prefix) == [True] * 4 + [False] * 4)


def test_cleared_pages_are_gone_after_a_restart_too(tmp_path: Path) -> None:
    with stores(tmp_path, full()) as first:
        first.set("kv", KEYS[:1], tokens_of(0))
        first.clear()
        assert first.contains("kv", KEYS[:1]) == [False]
        assert first.set("kv", KEYS[1:2], tokens_of(0)) == [True]
        assert first.contains("kv", KEYS[1:2]) == [True]
    epoch_of.cache_clear()  # as in another process
    with stores(tmp_path, full()) as second:
        assert second.contains("kv", KEYS[:1]) == [False]
        assert second.contains("kv", KEYS[1:2]) == [False]


def test_a_backend_that_is_attached_again_finds_no_cleared_page(tmp_path: Path) -> None:
    with served(tmp_path) as root:
        for _ in range(2):
            with stores(tmp_path, full(), service=root) as kept:
                assert kept.contains("kv", KEYS[:1]) == [False]
                assert kept.set("kv", KEYS[:1], tokens_of(0)) == [True]
                kept.clear()


def test_pages_whose_write_was_under_way_at_a_clear_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, cleared = PoolCache._end, list[PoolCache]()

    def clear_once(self: PoolCache, *args: Any) -> int:
        if not cleared:
            cleared.append(self)
            self.clear()
        return end(self, *args)

    with stores(tmp_path, full()) as kept:
        monkeypatch.setattr(PoolCache, "_end", clear_once)
        assert kept.set("kv", KEYS[:2], tokens_of(0, 1)) == [False, False]
        assert kept.contains("kv", KEYS[:2]) == [False, False]
        assert kept.set("kv", KEYS[:2], tokens_of(0, 1)) == [True, True]


def test_after_a_clear_that_failed_no_page_is_kept_or_found_until_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages may be those of old weights."""

    def fail(_: object) -> None:
        raise MemoryError

    with stores(tmp_path, full()) as kept:
        kept.set("kv", KEYS[:1], tokens_of(0))
        with monkeypatch.context() as patch:
            patch.setattr(PoolCache, "clear", fail)
            kept.clear()
        assert kept.contains("kv", KEYS[:1]) == [False]
        assert kept.get("kv", KEYS[:1], tokens_of(1)) == [False]
        assert kept.set("kv", KEYS[1:2], tokens_of(1)) == [False]
        kept.clear()
        assert kept.contains("kv", KEYS[:2]) == [False, False]
        assert kept.set("kv", KEYS[:1], tokens_of(0)) == [True]
        assert kept.contains("kv", KEYS[:1]) == [True]


def test_servers_share_the_pages_of_the_nodes_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, read = full(), MhaPool("page_first")
    with served(tmp_path) as root, stores(tmp_path, written, service=root) as one:
        monkeypatch.setattr("flexkv_sglang.hicache.epochs.engine_name", lambda: "another")
        epoch_of.cache_clear()
        with stores(tmp_path, read, service=root) as two:
            assert one.set("kv", KEYS[:3], tokens_of(0, 1, 2)) == [True] * 3
            assert two.get("kv", KEYS[:4], tokens_of(3, 4, 5, 6)) == [True] * 3 + [False]
            assert torch.equal(read.page(4), written.page(1))
            one.clear()
            assert one.contains("kv", KEYS[:1]) == [False]
            assert two.contains("kv", KEYS[:1]) == [True]


def test_a_bucket_gives_pages_after_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is missing: pip install 'flexkv[objects]'")
    (tmp_path / "shared").mkdir(mode=0o700)
    bucket = {
        "ssd_cache_gb": None,
        "ssd_cache_dir": (),
        "objects_url": f"file://{tmp_path}/shared",
        "objects_question_seconds": 30.0,
        "objects_timeout_seconds": 60.0,
    }
    written, read = full(), MhaPool("page_first")
    with stores(tmp_path, written, **bucket) as first:
        assert first.set("kv", KEYS[:3], tokens_of(0, 1, 2)) == [True] * 3
    with stores(tmp_path, read, **bucket) as second:
        until(lambda: second.contains("kv", KEYS[:4]) == [True, True, True, False])
        assert second.get("kv", KEYS[:4], tokens_of(3, 4, 5, 6)) == [True] * 3 + [False]
    assert torch.equal(read.page(4), written.page(1))


def test_without_the_service_pages_in_memory_are_found_and_no_call_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    after = MhaPool("page_first")
    with served(tmp_path) as root, stores(tmp_path, after, service=root) as kept:
        fill(after)
        assert kept.set("kv", KEYS[:2], tokens_of(0, 1)) == [True] * 2
        services[-1].close()
        assert kept.get("kv", KEYS[:3], tokens_of(4, 5, 6)) == [True, True, False]
        assert torch.equal(after.page(5), after.page(1))
        for number in range(3):
            assert kept.set("kv", [f"{number:064x}"], tokens_of(5))[0] is (number < 2)
        assert kept.contains("kv", KEYS[:3]) == [True, True, False]
    assert "error in" not in caplog.text


def test_nothing_is_found_once_it_is_closed(tmp_path: Path) -> None:
    with stores(tmp_path, full()) as kept:
        kept.set("kv", KEYS[:1], tokens_of(0))
        kept.close()
        kept.close()
        assert kept.contains("kv", KEYS[:1]) == [False]
        assert kept.get("kv", KEYS[:1], tokens_of(1)) == [False]
        assert kept.set("kv", KEYS[:1], tokens_of(1)) == [False]
        kept.clear()


def test_a_pool_that_comes_late_misses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with stores(tmp_path, full()) as kept:
        kept.add("mamba", MlaPool())
        assert kept.set("mamba", KEYS[:1], tokens_of(0)) == [False]
        assert kept.set("kv", KEYS[:1], tokens_of(0)) == [True]
    assert "'mamba' after FlexKV had opened" in caplog.text


def test_what_goes_wrong_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with stores(tmp_path, full()) as kept:
        assert kept.set("kv", KEYS[:2], tokens_of(0)) == [False, False]
        assert kept.get("kv", KEYS[:2], tokens_of(0)) == [False, False]
        assert kept.get("kv", KEYS[:2], None) == [False, False]
        assert kept.contains("kv", KEYS[:1]) == [False]
    assert "indices for 2 pages" in caplog.text


def test_copied_pages_count_though_their_use_cannot_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(PoolCache, "touch", fail)
    with stores(tmp_path, full()) as kept:
        assert kept.set("kv", KEYS[:2], tokens_of(0, 1)) == [True, True]
        assert kept.get("kv", KEYS[:3], tokens_of(4, 5, 6)) == [True, True, False]


def test_a_folder_that_cannot_be_opened_later_is_a_miss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    config = CacheConfig(
        cpu_cache_gb=0.001,
        ssd_cache_gb=0.001,
        ssd_cache_dir=(str(tmp_path / "file"),),
        runtime_dir=str(tmp_path / "run"),
    )
    kept = PoolStores(config, ONE, MODEL, ErrorBoundary())
    kept.add("kv", full())
    for _ in range(2):
        assert kept.set("kv", KEYS[:1], tokens_of(0)) == [False]
    assert caplog.text.count("error in set") == 1


def test_a_backend_without_a_disk_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ssd_cache_gb and ssd_cache_dir are not set; allowed"):
        PoolStores(CacheConfig(), ONE, MODEL, ErrorBoundary())
