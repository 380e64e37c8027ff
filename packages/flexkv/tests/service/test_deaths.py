# SPDX-License-Identifier: Apache-2.0
"""Schedulers, each a process, use a service while schedulers and the service are killed and stopped
at random: no byte is wrong, and no slot is lost. SERVICE_DEATHS says how many of them there are."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from packages.flexkv.tests.service.served import FORMAT, Service, until
from packages.flexkv.tests.service.traffic import Traffic, bytes_of
from packages.inside import index_of

DEATHS = int(os.environ.get("SERVICE_DEATHS", "6"))
SCHEDULERS, SLOTS = 3, 48
ROOT = Path(__file__).parents[4]


class Node:
    """A service and schedulers, as processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = str(folder / "service")
        self.seeds = 0
        self.service = self._serve()
        self.schedulers = [self._schedule() for _ in range(SCHEDULERS)]

    def _serve(self) -> subprocess.Popen[str]:
        environ = os.environ | {
            "FLEXKV_CPU_CACHE_GB": str(SLOTS * FORMAT.slot_bytes / (1 << 30)),
            "FLEXKV_RUNTIME_DIR": str(self.folder / "runtime"),
        }
        command = [sys.executable, "-m", "flexkv", "serve", self.root]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
        assert process.stdout is not None
        assert "listens" in process.stdout.readline()
        return process

    def _schedule(self) -> subprocess.Popen[str]:
        self.seeds += 1
        command = [sys.executable, "-m", "packages.flexkv.tests.service.traffic", self.root]
        return subprocess.Popen(
            [*command, str(self.seeds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def disturb(self, rng: random.Random) -> None:
        """Kill or stop one of the processes."""
        place = rng.randrange(SCHEDULERS)
        scheduler = self.schedulers[place]
        match rng.choice(["kill one", "stop one", "kill", "end", "stop"]):
            case "kill one":
                scheduler.kill()
                scheduler.communicate()
                self.schedulers[place] = self._schedule()
            case "stop one":
                scheduler.send_signal(signal.SIGSTOP)
                time.sleep(rng.uniform(0.1, 0.5))
                scheduler.send_signal(signal.SIGCONT)
            case "stop":
                self.service.send_signal(signal.SIGSTOP)
                time.sleep(rng.uniform(0.1, 1.5))
                self.service.send_signal(signal.SIGCONT)
            case "kill" | "end" as how:
                self.service.send_signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
                self.service.communicate()
                time.sleep(rng.uniform(0.0, 0.5))
                self.service = self._serve()

    def end(self) -> list[dict[str, int]]:
        """End all schedulers, then the service. Returns what they have loaded and stored."""
        said = [each.communicate()[0] for each in self.schedulers]
        assert not any(each.returncode for each in self.schedulers), "a byte is wrong"
        self.service.kill()
        self.service.communicate()
        return [json.loads(each) for each in said]

    def kill(self) -> None:
        for each in (self.service, *self.schedulers):
            if each.returncode is None:
                each.kill()
                each.communicate()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.kill()


def test_deaths_cost_no_byte_and_no_slot(node: Node, tmp_path: Path) -> None:
    rng = random.Random(7)
    mine = Traffic(node.root, rng)
    for _ in range(DEATHS):
        until_ = time.monotonic() + rng.uniform(0.1, 0.6)
        while time.monotonic() < until_:
            mine.step()
        node.disturb(rng)
        assert all(each.poll() is None for each in node.schedulers), "a byte is wrong"
    done = node.end()
    assert all(sum(each[what] for each in done) for what in ("loaded", "stored")), done
    while mine.begun:
        mine.end(0)
    mine.engine.cache.poll()
    last = Service(tmp_path, SLOTS)
    try:
        number = mine.engine.ticket.client
        until(
            lambda: [each.number for each in last.server.engines if each.is_served] == [number],
            mine.engine.cache.poll,
        )
        until(last.accounted, mine.engine.cache.poll)
        until(lambda: len(last.server.engines) == 1)  # those that were killed last wait for a while
        index = index_of(last.pool.cache)
        for block in index.blocks:
            view = mine.engine.arena.slot_view(block.slot)
            assert bytes(view) == bytes_of(block.key)
            view.release()
    finally:
        mine.engine.close()
        last.close()
