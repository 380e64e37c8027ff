# SPDX-License-Identifier: Apache-2.0
"""Programs without an engine that share the cache of the node's service."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from flexkv import ArenaError, KVLayout, PageCache, TensorView, open_cache
from flexkv.client import Hold
from flexkv.service import line
from packages.conftest import PATIENCE_SECONDS
from packages.flexkv.tests.library.test_page_cache import Steered
from packages.flexkv.tests.service.served import Service, until

PAGES = 64
KEYS = [b"block %d" % i for i in range(PAGES)]


class Program:
    """A cache over pages of its own."""

    def __init__(self, root: str, identity: str = "m") -> None:
        self.pages = np.zeros((PAGES, 4096), np.uint8)
        layout = KVLayout.from_tensors([TensorView.of("layer", self.pages)], PAGES)
        self.device = Steered()
        self.cache: PageCache = open_cache(
            {"service": root}, layout, identity=identity, device=self.device
        )

    def fill(self, count: int, start: int = 0, first: int = 1) -> int:
        """Store blocks, of which number i holds `first` + i."""
        for page in range(start, count):
            self.pages[page] = first + page
        after = KEYS[start - 1] if start else None
        return self.cache.store(KEYS[start:count], range(start, count), after)

    def load(self, count: int) -> list[int]:
        """What the loaded blocks hold."""
        self.pages[:] = 0
        loaded = self.cache.load(KEYS[:count], range(count))
        assert all((page == page[0]).all() for page in self.pages[:loaded])
        return [int(page[0]) for page in self.pages[:loaded]]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path, slots=128)
    yield made
    made.close()


@pytest.fixture
def program(service: Service) -> Iterator[Callable[..., Program]]:
    opened: list[Program] = []

    def begin(identity: str = "m") -> Program:
        opened.append(Program(service.root, identity))
        return opened[-1]

    yield begin
    for each in opened:
        each.cache.close()


def test_what_one_program_stores_another_loads(program: Callable[..., Program]) -> None:
    one, other, stranger = program(), program(), program("another model")
    assert one.fill(40) == 40, "more than the service grants at once"
    assert other.cache.lookup(KEYS) == 40
    assert other.load(40) == list(range(1, 41))
    assert other.fill(40) == 0, "the pool has them"
    assert stranger.cache.lookup(KEYS) == 0


def test_a_program_that_clears_leaves_others_their_blocks(
    program: Callable[..., Program],
) -> None:
    one, other = program(), program()
    one.fill(4)
    one.cache.clear()
    assert one.cache.lookup(KEYS[:4]) == 0
    assert one.fill(4, first=101) == 4
    assert one.load(4) == [101, 102, 103, 104]
    assert other.load(4) == [1, 2, 3, 4]


def test_pins_are_of_what_was_stored_since_the_clear(
    service: Service, program: Callable[..., Program]
) -> None:
    one = program()
    one.fill(4)
    one.cache.clear()
    cache = one.cache.cache
    cache.hold(Hold.PIN, one.cache.stored_keys(KEYS[:4]))
    assert one.fill(2, first=101) == 2
    cache.hold(Hold.PIN, one.cache.stored_keys(KEYS[:4]))
    until(lambda: service.pool.cache.pinned_blocks == 2, cache.poll)


def test_a_copy_of_before_a_clear_copies_nothing_after_it(program: Callable[..., Program]) -> None:
    one, other = program(), program()
    one.fill(4)
    one.device.is_lazy = True
    store = one.cache.begin_store(KEYS[4:40], range(4, 40), KEYS[3])
    one.cache.clear()
    one.device.is_lazy = False
    store.wait(PATIENCE_SECONDS)
    assert one.cache.lookup(KEYS) == 0
    until(lambda: other.cache.lookup(KEYS) == 4)


def test_without_the_service_host_hits_go_on_until_it_is_back(
    service: Service, program: Callable[..., Program]
) -> None:
    one, other = program(), program()
    one.fill(4)
    service.close()
    assert one.load(4) == [1, 2, 3, 4]
    assert one.fill(6, start=4) == 0
    assert one.cache.lookup(KEYS[:6]) == 4
    assert one.load(6) == [1, 2, 3, 4]
    assert one.cache.flush(PATIENCE_SECONDS)
    service.start()
    until(lambda: one.fill(6, start=4) == 2 or one.cache.lookup(KEYS[:6]) == 6)
    until(lambda: other.load(6) == [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("wakes", [True, False])
def test_what_a_service_that_hangs_was_told_counts_once_it_is_there(
    service: Service, program: Callable[..., Program], wakes: bool
) -> None:
    one = program()
    one.fill(4)
    service.stop()  # its sockets stay open
    stored = [one.fill(min(PAGES, start + 10), start=start) for start in range(4, PAGES, 10)]
    assert stored == [0] * 6, "nobody knows whether it will have them"
    assert not one.cache.flush(0.0)
    assert one.load(PAGES) == [1, 2, 3, 4]
    if wakes:
        service.wake()
    else:
        service.close()
    assert one.cache.flush(PATIENCE_SECONDS)
    there = 14 if wakes else 4
    assert one.load(14) == list(range(1, there + 1))


def test_a_store_lasts_until_the_service_has_its_blocks(
    service: Service, program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "_SILENT_SECONDS", 1e9)
    one = program()
    one.fill(1)
    service.stop()
    copy = one.cache.begin_store(KEYS[1:4], range(1, 4), KEYS[0])
    until(lambda: copy.done or one.cache.cache.status.publishing)
    assert not copy.done
    assert not copy.blocks
    service.wake()
    assert copy.wait(PATIENCE_SECONDS) == 3


def test_a_program_that_ends_at_once_leaves_what_it_has_stored(service: Service) -> None:
    text = """
import os, sys
from packages.flexkv.tests.library.test_page_cache_served import Program
print(Program(sys.argv[1]).fill(40), flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", text, service.root],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert done.stdout == "40\n", done.stderr
    one = Program(service.root)
    assert one.load(40) == list(range(1, 41))
    one.cache.close()


def test_loads_of_one_program_wait_for_each_other(program: Callable[..., Program]) -> None:
    """Together they hold more than one of two programs may."""
    one, _ = program(), program()
    one.fill(PAGES)
    one.device.is_lazy = True
    copies = [one.cache.begin_load(KEYS[i : i + 16], range(i, i + 16)) for i in range(0, PAGES, 16)]
    assert [copy.wait(PATIENCE_SECONDS) for copy in copies] == [16] * 4


def test_a_start_without_a_service_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexkv.service.attach._START_SECONDS", 0.0)
    with pytest.raises(ArenaError, match="no service of FlexKV answers"):
        Program(str(tmp_path / "nowhere"))
