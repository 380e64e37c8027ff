# SPDX-License-Identifier: Apache-2.0
"""A node of a cluster in a process of its own: a cache with its own arena over a shared store.

`Nodes` starts such processes. A node reads a command a line and answers each with a line: `store
abc` stores blocks and writes them to the shared store; `fetch abc` brings a prefix into the arena
and says how much of it came, each block with its own bytes; `reset`; `state` says whether the
store's circuit is closed; `clock` says what time of day it is.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexkv import KVCache
from flexkv.client import Reset
from flexkv.eviction import POLICIES, LRUPolicy
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.open_tiers import open_tiers
from flexkv.session.wire import SessionInfo
from flexkv.settings import CacheConfig
from flexkv.tiers import device, remote
from flexkv.tiers.epochs import FRESH_SECONDS, Epochs
from flexkv.tiers.remote import RemoteTier
from flexkv.tiers.shared_store import SharedStore
from flexkv.types.mover import Status
from packages.inside import index_of
from packages.inside_tiers import epoch_record, epochs_of
from packages.tier_blocks import ready_blocks

SLOT = 1 << 16
FINGERPRINT = "fe" * 16
SLOTS = 32
PATIENCE_SECONDS = 60.0
"""A busy machine may take longer to start, and to end its threads, than engines are to wait."""


def names(text: str) -> list[bytes]:
    return [each.encode() * 32 for each in text]


def content(key: bytes) -> bytes:
    return (key * SLOT)[:SLOT]


def be_patient(settings: Mapping[str, Any]) -> None:
    """Start and end without the limits for engines, which a busy machine exceeds.

    A node whose first question is late would drop its first blocks. Here it asks again.
    """
    device.CLOSE_SECONDS = PATIENCE_SECONDS
    remote.OPEN_SECONDS = PATIENCE_SECONDS
    ask = Epochs.open

    def ask_again(epochs: Epochs) -> str:
        late = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return ask(epochs)
            except OSError as error:
                was_late = isinstance(error, TimeoutError) or "within" in str(error)
                if not was_late or time.monotonic() > late:
                    raise

    Epochs.open = ask_again  # type: ignore[assignment, method-assign]


def open_tier(
    store: SharedStore, fingerprint: str = FINGERPRINT, slot_bytes: int = SLOT, **settings: Any
) -> RemoteTier:
    """The tier of a store that `settings` name, with limits that a busy machine keeps unless they
    set some."""
    limits = ("question_seconds", "timeout_seconds")
    patient = {f"{store.medium.value}_{each}": PATIENCE_SECONDS for each in limits}
    config = CacheConfig(**(patient | settings))
    opened = store.open(config, fingerprint, slot_bytes, 1 << 30)
    return RemoteTier(store.medium, opened, fingerprint, slot_bytes)


class Node:
    """See the module. `settings` are those of `CacheConfig`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.arena = Arena.create(ArenaSpec(BlockFormat(1, (SLOT,)), SLOTS), threads=1)
        be_patient(settings)
        tiers = open_tiers(
            CacheConfig(**settings), SessionInfo(FINGERPRINT, self.arena.spec), POLICIES["lru"]
        )
        (attached,) = tiers
        assert isinstance(attached.tier, RemoteTier)
        self.tier = attached.tier
        self.cache = KVCache(self.arena, LRUPolicy(), tiers)

    def store(self, text: str) -> str:
        prefix = names(text)
        missing = self.cache.missing(prefix)
        transfer = self.cache.store(prefix, missing)
        if transfer is not None:
            for key, slot in zip(transfer.keys, transfer.slots, strict=True):
                with self.arena.slot_view(slot) as view:
                    view[:] = content(key)
            self.arena.board.report(transfer.cell, 0, Status.DONE)
        self._settle()
        return f"{self.tier.figures.written_blocks}"

    def fetch(self, text: str) -> str:
        # In every step of its scheduler an engine asks anew for a request that waits.
        fetch = self.cache.fetch(names(text))
        if fetch is not None:
            while not self.cache.fetch_state(fetch).done:
                self.cache.poll()
                time.sleep(0.0005)
        hits = self.cache.lookup(names(text))
        if fetch is not None:
            self.cache.end_fetch(fetch)
        for key, block in ready_blocks(index_of(self.cache)).items():
            with self.arena.slot_view(block.slot) as view:
                if bytes(view) != content(key):
                    return "wrong bytes"
        return text[:hits]

    def reset(self, text: str) -> str:
        """Ends once the store has been told."""
        epochs = epochs_of(self.tier)
        before = epoch_record(epochs)
        self.cache.reset(Reset.CLEAR)
        while epoch_record(epochs) == before:
            time.sleep(0.01)
        return ""

    def state(self, text: str) -> str:
        (state,) = self.tier.figures.reads
        return state.value

    def clock(self, text: str) -> str:
        return str(time.time())

    def serve(self) -> None:
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            command, _, text = line.strip().partition(" ")
            print(json.dumps(getattr(self, command)(text)), flush=True)
        began = time.monotonic()
        ended = self.cache.close()
        print(json.dumps([ended, time.monotonic() - began]), flush=True)

    def _settle(self) -> None:
        while self.cache.busy:
            self.cache.poll()
            time.sleep(0.0005)


class Remote:
    """A node's process, as the test sees it. `command` runs its command line."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        environ: Mapping[str, str],
        command: Sequence[str] = (),
    ) -> None:
        # A file: a pipe that nobody reads stops the node once Mooncake has logged 64 KiB.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, sys.executable, __file__, json.dumps(dict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        )
        assert self._answer() == "ready"

    def do(self, command: str, text: str = "") -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {text}\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self) -> tuple[bool, float, str]:
        """Whether its tiers ended, in how many seconds, and what it logged."""
        out, _ = self.process.communicate(timeout=3 * PATIENCE_SECONDS)
        ended, seconds = json.loads(out.splitlines()[-1])
        return ended, seconds, self._logged()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._log.close()

    close = kill

    def _logged(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith(('"', "[")):
                return json.loads(line)
        self.process.communicate()
        raise AssertionError(self._logged())


def file_of(folder: Path, name: str) -> Path:
    """The file of a block in a shared folder."""
    (found,) = (folder / "blocks" / FINGERPRINT).glob(f"*/{(name.encode() * 32).hex()}")
    return found


def check_sharing(start: Callable[[], Remote], other: Remote, damage: Callable[[], None]) -> None:
    """Nodes share what one has stored as `abcd`, which is in the store; `other` is one of them.

    Args:
        start: makes a further node.
        other: a node.
        damage: changes a byte of block `b` in the store.
    """
    assert other.do("fetch", "abcdef") == "abcd"
    assert other.do("store", "abcde") == "1"  # what the cluster holds is not written again

    # Wrong bytes are a miss, and are written again by who computes them.
    damage()
    third = start()
    assert third.do("fetch", "abc") == "a"
    assert third.do("store", "abc") == "1"
    assert start().do("fetch", "abcdef") == "abcde"

    # After a reset of one, nobody finds anything of before; the others go on together without it.
    fourth = start()
    third.do("reset")
    assert third.do("fetch", "abc") == ""
    time.sleep(2 * FRESH_SECONDS)
    third.do("store", "mn")
    other.do("store", "pqr")
    assert (fourth.do("fetch", "abc"), fourth.do("fetch", "mn")) == ("", "")
    assert (fourth.do("fetch", "pqr"), third.do("fetch", "pqr")) == ("pqr", "")
    third.end()
    assert [start().do("fetch", text) for text in ("abc", "mn", "pqr")] == [""] * 3


def texts() -> Iterator[str]:
    """Prefixes of three blocks that no node knows."""
    for i in itertools.count():
        yield "".join(chr(0x1000 + 3 * i + j) for j in range(3))


def await_sharing(one: Remote, other: Remote, fresh: Iterator[str]) -> None:
    """Wait until `other` finds what `one` stores."""
    late = time.monotonic() + 3 * PATIENCE_SECONDS
    for text in fresh:
        assert time.monotonic() < late
        one.do("store", text)
        if other.do("fetch", text) == text:
            return
        time.sleep(0.2)


if __name__ == "__main__":
    Node(json.loads(sys.argv[1])).serve()
